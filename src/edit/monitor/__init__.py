"""What rounds did: as TensorBoard, as a log of JSON lines, and as a summary of that.

Two round hooks, :class:`TensorBoard` and :class:`JsonLines`, and a command: ``python -m edit.monitor RUN_DIR``.
Imported on demand; nothing else in the package knows it.
"""

from .hooks import JsonLines, TensorBoard
from .log import Log, read

__all__ = ["JsonLines", "Log", "TensorBoard", "read"]
