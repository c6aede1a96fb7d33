"""Where the files of models come from, and how they are kept on the disk of this node."""

from sie_adapter.weights.cache import LocalCache
from sie_adapter.weights.locks import Lock
from sie_adapter.weights.progress import Progress
from sie_adapter.weights.selection import FILES, PICKLED
from sie_adapter.weights.sources import Located, WeightSources, package_folder

__all__ = ["FILES", "PICKLED", "LocalCache", "Located", "Lock", "Progress", "WeightSources", "package_folder"]
