"""Files that are mapped while others may write them.

Bytes past the present end of a mapped file end the process when they are touched (SIGBUS), and no
exception says so.  Before a tensor's bytes are handed out, and between the pieces of a large one,
the file's present size is asked for: a file that has become shorter is then an error.  What is cut
off within the milliseconds after that still ends the process, so files must be left alone until
they are loaded; a new version is to be written beside the old one and renamed.
"""

import mmap

from infer.errors import WeightFormatError


def check_length(path: str, data: mmap.mmap | bytes, end: int) -> None:
    """Refuse a mapped file that by now ends before the byte `end`.

    Raises:
        WeightFormatError: it does.
    """
    if isinstance(data, mmap.mmap) and (size := data.size()) < end:
        raise WeightFormatError(
            f"{path}: has been cut to {size} bytes while it was read, and a tensor ends at byte "
            f"{end}; leave the file alone until it is loaded, and download it again"
        )
