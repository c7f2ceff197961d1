"""TensorBoard's event files, written with tensorboard's own parts and no TensorFlow."""

import os
import pathlib
import time

import numpy as np

MISSING = (
    "A log folder is for TensorBoard, whose package writes the files. The package "
    "`tensorboard` was not found. Run `pip install tensorboard`, or leave `log_dir` "
    "out and read `frame()` or the history of `fit`."
)
HISTOGRAM_BINS = 30


class EventFile:
    """One event file in a folder.

    `tensorboard.summary.Writer` would do for scalars; its file layer imports TensorFlow
    wherever that is installed, which takes seconds, so the file is opened here.

    Args:
        folder: Where the file goes; made if needed.

    Raises:
        ImportError: tensorboard is not installed.
        ValueError: The folder cannot be written to.
    """

    def __init__(self, folder):
        self.check()
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.histogram import metadata as histogram
        from tensorboard.plugins.image import metadata as image
        from tensorboard.plugins.scalar import metadata as scalar
        from tensorboard.plugins.text import metadata as text
        from tensorboard.summary.writer.record_writer import RecordWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        self._proto, self._summary = event_pb2, summary_pb2.Summary
        self._tensor = make_tensor_proto
        self._metadata = {
            "scalar": scalar,
            "histogram": histogram,
            "image": image,
            "text": text,
        }
        folder = pathlib.Path(folder)
        stamp = f"{int(time.time()):010d}.{time.perf_counter_ns()}"
        path = folder / f"events.out.tfevents.{stamp}.{os.getpid()}.curvature"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(open(path, "wb"))
        except OSError as error:
            raise ValueError(
                "`log_dir` must be a folder that can be written to. Received "
                f"log_dir={str(folder.parent)!r}: {error.strerror}."
            ) from error
        version = event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")
        self._records.write(version.SerializeToString())

    @staticmethod
    def check() -> None:
        """Raise an `ImportError` where tensorboard is not installed."""
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            raise ImportError(MISSING) from error

    def scalar(self, tag: str, step: int, value: float, description: str = "") -> None:
        """Write a number, if it is finite."""
        if np.isfinite(value):
            self._write("scalar", tag, step, np.float32(value), description)

    def histogram(self, tag: str, step: int, values, description: str = "") -> None:
        """Write the histogram of the finite ones among some numbers."""
        values = np.asarray(values, float)
        counts, edges = np.histogram(values[np.isfinite(values)], HISTOGRAM_BINS)
        bins = np.stack([edges[:-1], edges[1:], counts], axis=1)
        self._write("histogram", tag, step, bins, description)

    def image(self, tag: str, step: int, png: bytes, size, description="") -> None:
        """Write a picture.

        Args:
            tag: Its name.
            step: The step that it belongs to.
            png: The picture, encoded.
            size: `(width, height)` in pixels.
            description: What it shows.
        """
        value = np.array([str(n).encode() for n in size] + [png], object)
        self._write("image", tag, step, value, description)

    def text(self, tag: str, step: int, markdown: str) -> None:
        """Write a page of Markdown."""
        self._write("text", tag, step, np.array([markdown.encode()], object), "")

    def flush(self) -> None:
        """Let a reader see what was written."""
        self._records.flush()

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _write(self, kind, tag, step, value, description):
        summary = self._summary.Value(
            tag=tag,
            tensor=self._tensor(value),
            metadata=self._metadata[kind].create_summary_metadata(None, description),
        )
        event = self._proto.Event(
            wall_time=time.time(), step=step, summary=self._summary(value=[summary])
        )
        self._records.write(event.SerializeToString())
