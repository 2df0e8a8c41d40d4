from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    COMPUTING: _ClassVar[Phase]
    READY: _ClassVar[Phase]
    UPDATING: _ClassVar[Phase]
    UPDATED: _ClassVar[Phase]
    SKIPPED: _ClassVar[Phase]
    TORN: _ClassVar[Phase]
    DONE: _ClassVar[Phase]

class DeathSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEATH_SOURCE_UNSPECIFIED: _ClassVar[DeathSource]
    ROBUST_MUTEX: _ClassVar[DeathSource]
    PIDFD: _ClassVar[DeathSource]
    STREAM: _ClassVar[DeathSource]

class ExitKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXIT_KIND_UNSPECIFIED: _ClassVar[ExitKind]
    SAVED: _ClassVar[ExitKind]
    NOTHING_TO_SAVE: _ClassVar[ExitKind]
    NOT_SAVED: _ClassVar[ExitKind]
PHASE_UNSPECIFIED: Phase
COMPUTING: Phase
READY: Phase
UPDATING: Phase
UPDATED: Phase
SKIPPED: Phase
TORN: Phase
DONE: Phase
DEATH_SOURCE_UNSPECIFIED: DeathSource
ROBUST_MUTEX: DeathSource
PIDFD: DeathSource
STREAM: DeathSource
EXIT_KIND_UNSPECIFIED: ExitKind
SAVED: ExitKind
NOTHING_TO_SAVE: ExitKind
NOT_SAVED: ExitKind

class Stand(_message.Message):
    __slots__ = ("phase", "step")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    phase: Phase
    step: int
    def __init__(self, phase: _Optional[_Union[Phase, str]] = ..., step: _Optional[int] = ...) -> None: ...

class Schedule(_message.Message):
    __slots__ = ("steps", "seconds", "keep_max", "keep_minutes")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_MAX_FIELD_NUMBER: _ClassVar[int]
    KEEP_MINUTES_FIELD_NUMBER: _ClassVar[int]
    steps: int
    seconds: float
    keep_max: int
    keep_minutes: int
    def __init__(self, steps: _Optional[int] = ..., seconds: _Optional[float] = ..., keep_max: _Optional[int] = ..., keep_minutes: _Optional[int] = ...) -> None: ...

class ProcessId(_message.Message):
    __slots__ = ("host_id", "pid", "start_ticks", "nonce")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    START_TICKS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    pid: int
    start_ticks: int
    nonce: str
    def __init__(self, host_id: _Optional[str] = ..., pid: _Optional[int] = ..., start_ticks: _Optional[int] = ..., nonce: _Optional[str] = ...) -> None: ...

class FromRank(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[Report]
    def __init__(self, reports: _Optional[_Iterable[_Union[Report, _Mapping]]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("hello", "loop_begin", "status", "settled", "save_progress", "saved", "save_failed", "raised", "signalled", "left", "peer_died", "goodbye", "save_wanted", "stack")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOOP_BEGIN_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    SAVE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    SAVE_FAILED_FIELD_NUMBER: _ClassVar[int]
    RAISED_FIELD_NUMBER: _ClassVar[int]
    SIGNALLED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    PEER_DIED_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    SAVE_WANTED_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    loop_begin: LoopBegin
    status: Status
    settled: Settled
    save_progress: SaveProgress
    saved: Saved
    save_failed: SaveFailed
    raised: Raised
    signalled: Signalled
    left: Left
    peer_died: PeerDied
    goodbye: Goodbye
    save_wanted: SaveWanted
    stack: Stack
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., loop_begin: _Optional[_Union[LoopBegin, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., save_progress: _Optional[_Union[SaveProgress, _Mapping]] = ..., saved: _Optional[_Union[Saved, _Mapping]] = ..., save_failed: _Optional[_Union[SaveFailed, _Mapping]] = ..., raised: _Optional[_Union[Raised, _Mapping]] = ..., signalled: _Optional[_Union[Signalled, _Mapping]] = ..., left: _Optional[_Union[Left, _Mapping]] = ..., peer_died: _Optional[_Union[PeerDied, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., save_wanted: _Optional[_Union[SaveWanted, _Mapping]] = ..., stack: _Optional[_Union[Stack, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("rank", "generation", "world_size", "process", "units", "stand", "shared")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    STAND_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    world_size: int
    process: ProcessId
    units: _containers.RepeatedScalarFieldContainer[str]
    stand: Stand
    shared: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., world_size: _Optional[int] = ..., process: _Optional[_Union[ProcessId, _Mapping]] = ..., units: _Optional[_Iterable[str]] = ..., stand: _Optional[_Union[Stand, _Mapping]] = ..., shared: _Optional[_Iterable[str]] = ...) -> None: ...

class LoopBegin(_message.Message):
    __slots__ = ("rank", "generation", "steps_per_epoch", "epochs", "start_step", "schedule")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    START_STEP_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    steps_per_epoch: int
    epochs: int
    start_step: int
    schedule: Schedule
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., steps_per_epoch: _Optional[int] = ..., epochs: _Optional[int] = ..., start_step: _Optional[int] = ..., schedule: _Optional[_Union[Schedule, _Mapping]] = ...) -> None: ...

class SaveWanted(_message.Message):
    __slots__ = ("rank", "generation", "after_step")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    after_step: int
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., after_step: _Optional[int] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("rank", "generation", "stand", "waits_at", "stands_at", "work_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STAND_FIELD_NUMBER: _ClassVar[int]
    WAITS_AT_FIELD_NUMBER: _ClassVar[int]
    STANDS_AT_FIELD_NUMBER: _ClassVar[int]
    WORK_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    stand: Stand
    waits_at: str
    stands_at: str
    work_s: float
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., stand: _Optional[_Union[Stand, _Mapping]] = ..., waits_at: _Optional[str] = ..., stands_at: _Optional[str] = ..., work_s: _Optional[float] = ...) -> None: ...

class Stack(_message.Message):
    __slots__ = ("rank", "generation", "text")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    text: str
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("rank", "generation", "incident", "sequence", "stand", "copies", "doubts")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STAND_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    DOUBTS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    incident: int
    sequence: int
    stand: Stand
    copies: _containers.RepeatedCompositeFieldContainer[WholeCopy]
    doubts: str
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., incident: _Optional[int] = ..., sequence: _Optional[int] = ..., stand: _Optional[_Union[Stand, _Mapping]] = ..., copies: _Optional[_Iterable[_Union[WholeCopy, _Mapping]]] = ..., doubts: _Optional[str] = ...) -> None: ...

class WholeCopy(_message.Message):
    __slots__ = ("rank", "step")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class SaveProgress(_message.Message):
    __slots__ = ("rank", "generation", "incident", "attempt", "bytes_written", "syncing")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    SYNCING_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    incident: int
    attempt: int
    bytes_written: int
    syncing: bool
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., incident: _Optional[int] = ..., attempt: _Optional[int] = ..., bytes_written: _Optional[int] = ..., syncing: bool = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("rank", "generation", "incident", "attempt", "step", "bytes_written")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    incident: int
    attempt: int
    step: int
    bytes_written: int
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., incident: _Optional[int] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., bytes_written: _Optional[int] = ...) -> None: ...

class SaveFailed(_message.Message):
    __slots__ = ("rank", "generation", "incident", "attempt", "step", "reason", "storage", "missed")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    incident: int
    attempt: int
    step: int
    reason: str
    storage: bool
    missed: bool
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., incident: _Optional[int] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., reason: _Optional[str] = ..., storage: bool = ..., missed: bool = ...) -> None: ...

class Raised(_message.Message):
    __slots__ = ("rank", "generation", "text", "secondary", "stand")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SECONDARY_FIELD_NUMBER: _ClassVar[int]
    STAND_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    text: str
    secondary: bool
    stand: Stand
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., text: _Optional[str] = ..., secondary: bool = ..., stand: _Optional[_Union[Stand, _Mapping]] = ...) -> None: ...

class Signalled(_message.Message):
    __slots__ = ("rank", "generation", "signal_number", "stand")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STAND_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    signal_number: int
    stand: Stand
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., signal_number: _Optional[int] = ..., stand: _Optional[_Union[Stand, _Mapping]] = ...) -> None: ...

class Left(_message.Message):
    __slots__ = ("rank", "generation", "stand")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STAND_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    stand: Stand
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., stand: _Optional[_Union[Stand, _Mapping]] = ...) -> None: ...

class PeerDied(_message.Message):
    __slots__ = ("rank", "generation", "dead_rank", "source", "how")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DEAD_RANK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    dead_rank: int
    source: DeathSource
    how: str
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ..., dead_rank: _Optional[int] = ..., source: _Optional[_Union[DeathSource, str]] = ..., how: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("rank", "generation")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    rank: int
    generation: int
    def __init__(self, rank: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class ToRank(_message.Message):
    __slots__ = ("orders",)
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    orders: _containers.RepeatedCompositeFieldContainer[AddressedOrder]
    def __init__(self, orders: _Optional[_Iterable[_Union[AddressedOrder, _Mapping]]] = ...) -> None: ...

class AddressedOrder(_message.Message):
    __slots__ = ("ranks", "order")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    order: Order
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., order: _Optional[_Union[Order, _Mapping]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("welcome", "refused", "loop_go", "freeze", "proceed", "save", "resume", "exit", "release", "notice")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LOOP_GO_FIELD_NUMBER: _ClassVar[int]
    FREEZE_FIELD_NUMBER: _ClassVar[int]
    PROCEED_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    loop_go: LoopGo
    freeze: Freeze
    proceed: Proceed
    save: Save
    resume: Resume
    exit: Exit
    release: Release
    notice: Notice
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., loop_go: _Optional[_Union[LoopGo, _Mapping]] = ..., freeze: _Optional[_Union[Freeze, _Mapping]] = ..., proceed: _Optional[_Union[Proceed, _Mapping]] = ..., save: _Optional[_Union[Save, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., exit: _Optional[_Union[Exit, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("generation", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class LoopGo(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class Freeze(_message.Message):
    __slots__ = ("generation", "incident", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    incident: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., incident: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Proceed(_message.Message):
    __slots__ = ("generation", "incident", "step")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    generation: int
    incident: int
    step: int
    def __init__(self, generation: _Optional[int] = ..., incident: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Save(_message.Message):
    __slots__ = ("generation", "incident", "attempt", "step", "units", "local_ranks", "target", "reason", "copied")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANKS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    incident: int
    attempt: int
    step: int
    units: _containers.RepeatedScalarFieldContainer[str]
    local_ranks: _containers.RepeatedScalarFieldContainer[int]
    target: int
    reason: str
    copied: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, generation: _Optional[int] = ..., incident: _Optional[int] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., units: _Optional[_Iterable[str]] = ..., local_ranks: _Optional[_Iterable[int]] = ..., target: _Optional[int] = ..., reason: _Optional[str] = ..., copied: _Optional[_Iterable[str]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("generation", "incident")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    incident: int
    def __init__(self, generation: _Optional[int] = ..., incident: _Optional[int] = ...) -> None: ...

class Exit(_message.Message):
    __slots__ = ("generation", "incident", "kind", "step", "path", "reason", "cause_ranks")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_RANKS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    incident: int
    kind: ExitKind
    step: int
    path: str
    reason: str
    cause_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generation: _Optional[int] = ..., incident: _Optional[int] = ..., kind: _Optional[_Union[ExitKind, str]] = ..., step: _Optional[int] = ..., path: _Optional[str] = ..., reason: _Optional[str] = ..., cause_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("generation", "text", "stack")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    generation: int
    text: str
    stack: bool
    def __init__(self, generation: _Optional[int] = ..., text: _Optional[str] = ..., stack: bool = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("without_ranks",)
    WITHOUT_RANKS_FIELD_NUMBER: _ClassVar[int]
    without_ranks: bool
    def __init__(self, without_ranks: bool = ...) -> None: ...

class StateReply(_message.Message):
    __slots__ = ("job", "generation", "world_size", "pid", "uptime_s", "stage", "incident", "summary", "ranks", "incidents", "open")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    world_size: int
    pid: int
    uptime_s: float
    stage: str
    incident: int
    summary: str
    ranks: _containers.RepeatedCompositeFieldContainer[RankState]
    incidents: str
    open: OpenIncident
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., world_size: _Optional[int] = ..., pid: _Optional[int] = ..., uptime_s: _Optional[float] = ..., stage: _Optional[str] = ..., incident: _Optional[int] = ..., summary: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[RankState, _Mapping]]] = ..., incidents: _Optional[str] = ..., open: _Optional[_Union[OpenIncident, _Mapping]] = ...) -> None: ...

class OpenIncident(_message.Message):
    __slots__ = ("reason", "since_s", "written_bytes")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    reason: str
    since_s: float
    written_bytes: int
    def __init__(self, reason: _Optional[str] = ..., since_s: _Optional[float] = ..., written_bytes: _Optional[int] = ...) -> None: ...

class RankState(_message.Message):
    __slots__ = ("rank", "process", "stand", "connected", "dead", "heard_s", "waits_at", "stands_at", "work_s", "slower", "sole_holder")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    STAND_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    HEARD_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_AT_FIELD_NUMBER: _ClassVar[int]
    STANDS_AT_FIELD_NUMBER: _ClassVar[int]
    WORK_S_FIELD_NUMBER: _ClassVar[int]
    SLOWER_FIELD_NUMBER: _ClassVar[int]
    SOLE_HOLDER_FIELD_NUMBER: _ClassVar[int]
    rank: int
    process: ProcessId
    stand: Stand
    connected: bool
    dead: bool
    heard_s: float
    waits_at: str
    stands_at: str
    work_s: float
    slower: float
    sole_holder: bool
    def __init__(self, rank: _Optional[int] = ..., process: _Optional[_Union[ProcessId, _Mapping]] = ..., stand: _Optional[_Union[Stand, _Mapping]] = ..., connected: bool = ..., dead: bool = ..., heard_s: _Optional[float] = ..., waits_at: _Optional[str] = ..., stands_at: _Optional[str] = ..., work_s: _Optional[float] = ..., slower: _Optional[float] = ..., sole_holder: bool = ...) -> None: ...
