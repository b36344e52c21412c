"""Named errors. Each message says what was asked, what is true and what to do."""

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def short(value: object) -> str:
    """The value as a message shows it: at most 200 characters; its type, if it can not be shown."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # its own __repr__'s, or of an int with more digits than are printed
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:197]}..."


class PurestepError(Exception):
    """Base of every error that a caller of purestep can cause."""


class InvalidRequestError(PurestepError, ValueError):
    """A request that can not be served; no other request and no state is touched by it."""


class InvalidParameterError(InvalidRequestError):
    """A sampling parameter outside its domain."""


class GrammarError(InvalidRequestError):
    """A grammar that can not be compiled or obeyed, or nothing to compile it with."""


class PromptTooLongError(InvalidRequestError):
    """A prompt longer than the model's or the cache's limit."""


class DuplicateRequestError(InvalidRequestError):
    """A request id that is already in use."""


class SchedulerOutputError(PurestepError, ValueError):
    """A SchedulerOutput that contradicts the batch it is applied to."""


class ExtrasError(PurestepError, ValueError):
    """A batch whose sampling takes more than its state holds, and that was not given it."""


class DrafterError(PurestepError, ValueError):
    """A drafter that does not fit the state, the model or the parameters that it is used with."""


class OutOfBlocksError(PurestepError, RuntimeError):
    """No KV block is left where one must be had."""


class OutOfRowsError(PurestepError, RuntimeError):
    """No row is left where one must be had."""


class ProcessorError(PurestepError, RuntimeError):
    """A logits processor that failed in the midst of a run: its request can not go on."""


class NoTokenError(PurestepError, RuntimeError):
    """A request that no token could be drawn for: it has ended."""


class ReentrantCallError(PurestepError, RuntimeError):
    """A call of an engine from inside a step of it."""


class StaleStateError(PurestepError, RuntimeError):
    """A device state that was consumed by a later step."""


class PlanBaseError(PurestepError, RuntimeError):
    """A plan made for another batch than the one the device state reflects."""


class FreshStorageError(PurestepError, RuntimeError):
    """A step on persistent buffers returned a large leaf in storage of its own."""


class CaptureError(PurestepError, RuntimeError):
    """A step that can not be captured on the buffers."""


class DeviceMemoryError(PurestepError, RuntimeError):
    """More memory than a device has, or than is left of it."""


class ModelLoadError(PurestepError, ValueError):
    """A model that can not be loaded: unknown architecture, missing or misshapen tensor, damaged file."""


class CUDAGraphModeError(PurestepError, ValueError):
    """A CUDA graph mode that the kernels or the model do not allow."""


class CaptureSizeError(PurestepError, ValueError):
    """Capture sizes that can not serve the batches they are meant for."""


class DispatchError(PurestepError, ValueError):
    """A batch that can not be run in any of the modes and shapes allowed for it."""


class KVCacheConfigError(PurestepError, ValueError):
    """A KV cache that can not be laid out as asked."""


class BenchmarkError(PurestepError, RuntimeError):
    """A measurement that did not do the work that was to be timed, or could not be made at all."""
