from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupInfo(_message.Message):
    __slots__ = ("format", "rank", "world_size", "group", "units")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    format: int
    rank: int
    world_size: int
    group: _containers.RepeatedScalarFieldContainer[int]
    units: _containers.RepeatedCompositeFieldContainer[UnitHolders]
    def __init__(self, format: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., group: _Optional[_Iterable[int]] = ..., units: _Optional[_Iterable[_Union[UnitHolders, _Mapping]]] = ...) -> None: ...

class UnitHolders(_message.Message):
    __slots__ = ("name", "holders")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    holders: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., holders: _Optional[_Iterable[int]] = ...) -> None: ...
