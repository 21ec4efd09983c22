"""The core: requests, sentences, prompts, decoders and the streaming session."""

from headstart.session import StreamingSession

__all__ = ["StreamingSession"]
