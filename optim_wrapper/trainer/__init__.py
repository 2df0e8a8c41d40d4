"""What a training script registers and enters: `TFTRegister` and the parts that run while it is protected."""
