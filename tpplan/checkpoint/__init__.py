"""Checkpoints in safetensors files: each rank reads and writes its own part of them."""

from tpplan.checkpoint.files import CheckpointError as CheckpointError
from tpplan.checkpoint.load import Loaded as Loaded
from tpplan.checkpoint.load import load_checkpoint as load_checkpoint
from tpplan.checkpoint.save import save_checkpoint as save_checkpoint
from tpplan.checkpoint.whole import teach_saving as teach_saving
from tpplan.checkpoint.whole import whole_state as whole_state
