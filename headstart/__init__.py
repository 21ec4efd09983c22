"""The core: requests, sentences, prompts, decoders and the streaming session."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.session import StreamingSession

__all__ = ["StreamingSession"]


def __getattr__(name: str) -> Any:
    """The session on demand: it needs torch, which the workers of a data build can do without."""
    if name == "StreamingSession":
        from headstart.session import StreamingSession

        return StreamingSession
    raise AttributeError(name)
