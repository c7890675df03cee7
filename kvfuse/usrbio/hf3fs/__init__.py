"""3FS's ring calls over a kvfuse mount. `api` says what each does."""

from kvfuse.usrbio.hf3fs.api import *  # noqa: F403  its names are stated once, in its __all__
from kvfuse.usrbio.hf3fs.api import __all__ as __all__
