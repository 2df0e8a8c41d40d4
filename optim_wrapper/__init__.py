"""The trainer's side: optimizers that say where their step stands, and what is built around them.

In this folder: the wrapper of an optimizer (`wrapper`) and of several, and what optimizers hide. In its packages, each
of which imports only those below it:

- `trainer`: `TFTRegister`, and the parts that run while a job is protected
- `resume`: choosing a checkpoint, putting it back here or in another layout, telling what is not exact
- `loop`: epochs, steps and batches, and where a resumed run goes on in its data
- `launch`: settings, the switch, the ranks' agreement, the start of the controller
- `capture`: what is copied or witnessed in each step, and where the writer finds it during an incident
- `state`: what a model, its optimizer and the extras hold, by name and by unit
- `streams`: random number generators; `ddp`: DistributedDataParallel
- `tensors`: tensors and Python values as bytes
"""
