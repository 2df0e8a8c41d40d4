class BucketOrder:
    @classmethod
    def observe(cls, model):
        return cls()
    def record(self):
        return {}
def replay(model, record):
    return []
