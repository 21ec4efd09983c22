"""Answers from a server that speaks OpenAI's protocol (vLLM, `transformers serve`, ...): many requests in flight.

The server has to render our prompt and to decode greedily: the first is proved with each answer by the number of prompt
tokens; for the second, serve without sampling defaults of the model's own (`vllm serve --generation-config vllm`).
"""

import asyncio
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from data_builders.answers import TEMPLATE, Question, Raw
from headstart.lookup import Tokens
from headstart.prompt import Renderer, conversation
from recipes.errors import UserError

KEY = "HEADSTART_API_KEY"
CONTROL = "control string in the request"
TOO_LONG = "request too long for the server"
TRANSIENT = (408, 409, 429)  # and 5xx
FIRST_DELAY, LONGEST_DELAY = 0.5, 15.0  # seconds between two tries
QUIET = 60.0  # seconds between two lines about a server in trouble
STOPS = {"stop": "end", "length": "length"}


class Server:
    """A backend of `answers.answers`: chat completions at temperature 0 from the server at `url`.

    `model` names the model of the recipe, `served` what the server calls it. Errors that may pass (no connection, 408,
    409, 429, 5xx) are tried again for `patience` seconds a question; a request without an answer after `timeout`
    seconds counts as one. The key comes from the environment variable HEADSTART_API_KEY and is never shown.
    """

    def __init__(
        self,
        url: str,
        renderer: Renderer,
        limit: int,
        model: str,
        served: str | None = None,
        in_flight: int = 32,
        patience: float = 600.0,
        timeout: float = 1800.0,
    ) -> None:
        self.url = _checked_url(url)
        self.renderer = renderer
        self.limit = limit
        self.model = model
        self.served = served or model
        self.in_flight = in_flight
        self.patience = patience
        self.timeout = timeout
        self._open: _Open | None = None
        self._said = 0.0
        self._uncounted = False

    @property
    def settings(self) -> Mapping[str, Any]:
        """Without the URL: the same model may be served elsewhere."""
        return {
            "backend": "server",
            "model": self.model,
            "served": self.served,
            "renderer": self.renderer.fingerprint,
            "max_new_tokens": self.limit,
            "greedy": True,
        }

    def ask(self, key: str, question: Question) -> str | None:
        """Take a question; the first one looks whether the server is there and serves the model.

        A server reads a control string inside content as control; ours is text. So such a request is not asked.
        """
        messages = conversation(question.text, question.history, question.system)
        if any(self.renderer.control.search(message["content"]) for message in messages):
            return CONTROL
        try:
            prompt = self.renderer.prompt(question.text, question.history, question.system)
        except UserError:
            return TEMPLATE
        if self._open is None:
            self._open = _Open(self)
        if len(prompt) + self.limit > self._open.room:
            return TOO_LONG
        self._open.start(key, question.id, messages, prompt)
        return None

    def finished(self) -> Sequence[tuple[str, Raw]]:
        """The answers that came in. Raises UserError once one of the questions cannot be answered."""
        assert self._open is not None, "nothing was asked"
        return self._open.collect()

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    async def answer(
        self, client: openai.AsyncOpenAI, question_id: str, messages: Sequence[dict[str, str]], prompt: Tokens
    ) -> Raw:
        """One question, tried again while what goes wrong may pass."""
        given_up, delay = None, FIRST_DELAY
        trouble: openai.APIError
        while True:
            try:
                return self._read(question_id, await self._post(client, messages), prompt)
            except openai.APIConnectionError as error:
                trouble, wait = error, 0.0
            except openai.APIStatusError as error:
                if error.status_code not in TRANSIENT and error.status_code < 500:
                    raise UserError(f"{self.url}: {self.words(error)} (request {question_id})") from error
                trouble, wait = error, _retry_after(error)
            now = time.monotonic()
            given_up = given_up or now + self.patience
            if now >= given_up:
                raise UserError(
                    f"{self.url}: no answer to {question_id} within {self.patience:.0f} s of trying again "
                    f"({self.words(trouble)}); the same command goes on from here"
                ) from trouble
            self._say(trouble)
            await asyncio.sleep(min(max(wait, delay * random.uniform(0.5, 1.0)), given_up - now))
            delay = min(2 * delay, LONGEST_DELAY)

    async def _post(self, client: openai.AsyncOpenAI, messages: Sequence[dict[str, str]]) -> ChatCompletion:
        arguments = self.renderer.family.template_arguments
        try:
            return await client.chat.completions.create(
                model=self.served,
                messages=cast(list[ChatCompletionMessageParam], messages),
                temperature=0,
                max_tokens=self.limit,
                extra_body={"chat_template_kwargs": dict(arguments)} if arguments else None,
            )
        except ValueError as error:  # no JSON
            raise UserError(f"{self.url}: its answer cannot be read ({self.line(error)})") from error

    def _read(self, question_id: str, completion: ChatCompletion, prompt: Tokens) -> Raw:
        """Raises UserError where the answer is not of the protocol, or to another prompt than ours."""
        try:
            choice, usage = completion.choices[0], completion.usage
            text, extra = choice.message.content or "", choice.message.model_extra or {}
            stop = STOPS.get(choice.finish_reason, str(choice.finish_reason))
            counted = usage.prompt_tokens if usage is not None else 0
            if not isinstance(text, str):
                raise TypeError
        except (AttributeError, TypeError, IndexError) as error:  # the client does not check what it is given
            raise UserError(f"{self.url}: its answer is no chat completion: {self.line(completion)}") from error
        if not counted:
            self._say_uncounted()
        elif counted != len(prompt):
            raise UserError(
                f"{self.url}: renders another prompt than ours: {counted} tokens there, {len(prompt)} here "
                f"(request {question_id}); give it the chat template of {self.renderer.tokenizer.name_or_path}, "
                f"with {dict(self.renderer.family.template_arguments)}"
            )
        thought = extra.get("reasoning_content") or extra.get("reasoning")
        return Raw(text, "reasoning" if thought else stop)

    def words(self, error: openai.APIError) -> str:
        """What went wrong in one line: the status and the server's own words, or why there is no connection."""
        if not isinstance(error, openai.APIStatusError):
            return self.line(error.__cause__ or error) or type(error.__cause__ or error).__name__
        body: Any = error.body
        said = body.get("message") if isinstance(body, dict) else None
        hint = f"; the key is read from {KEY}" if error.status_code in (401, 403) else ""
        return f"status {error.status_code}: {self.line(said or error.response.text)}{hint}"

    def line(self, said: object) -> str:
        """One short line without the key."""
        key = _key()
        text = str(said) if key == "none" else str(said).replace(key, "***")
        return " ".join(text.split())[:300]

    def _say(self, trouble: openai.APIError) -> None:
        if not self._said or time.monotonic() - self._said > QUIET:
            self._said = time.monotonic()
            print(f"{self.url}: {self.words(trouble)}; trying again for up to {self.patience:.0f} s", flush=True)

    def _say_uncounted(self) -> None:
        if not self._uncounted:
            self._uncounted = True
            print(f"{self.url}: counts no prompt tokens, so that it renders our prompt is not proved", flush=True)


class _Open:
    """A connection: the loop that runs while answers are waited for, and the requests in flight.

    `room` is the number of tokens that the server takes for prompt and answer, where it says so.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.runner = asyncio.Runner()
        self.client = openai.AsyncOpenAI(
            api_key=_key(),
            base_url=server.url,
            max_retries=0,
            timeout=openai.Timeout(server.timeout, connect=10.0),
        )
        self.free = asyncio.Semaphore(server.in_flight)
        self.done = asyncio.Queue[tuple[str, Raw | Exception]]()
        self.failed: Exception | None = None
        self.tasks = set[asyncio.Task[None]]()
        try:
            self.room = self.runner.run(self._look())
        except BaseException:
            self.close()
            raise

    async def _look(self) -> float:
        """Read what the server serves. Raises UserError where it is not there or does not serve the model."""
        server, url = self.server, self.server.url
        try:
            models = (await self.client.models.list()).data
            by_name = {model.id: model for model in models}
        except openai.APIStatusError as error:
            raise UserError(f"{url}: {server.words(error)}") from error
        except openai.APIConnectionError as error:
            raise UserError(f"{url}: no server answers there ({server.words(error)})") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{url}: does not list its models as OpenAI's protocol has it") from error
        if server.served not in by_name:
            there = ", ".join(sorted(by_name)) or "nothing"
            raise UserError(
                f"{url}: does not serve {server.served} but {there}; set data.server_model to its name there"
            )
        room = (by_name[server.served].model_extra or {}).get("max_model_len")
        return room if isinstance(room, int) else float("inf")

    def start(self, key: str, question_id: str, messages: Sequence[dict[str, str]], prompt: Tokens) -> None:
        """Queue a question; it is sent while `collect` waits."""
        task = self.runner.get_loop().create_task(self._work(key, question_id, messages, prompt))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _work(self, key: str, question_id: str, messages: Sequence[dict[str, str]], prompt: Tokens) -> None:
        async with self.free:
            try:
                result: Raw | Exception = await self.server.answer(self.client, question_id, messages, prompt)
            except Exception as error:  # raised again where answers are waited for
                result = error
        self.done.put_nowait((key, result))

    def collect(self) -> Sequence[tuple[str, Raw]]:
        """Wait for one answer, and take all that are there. A failure is raised after the answers before it."""
        if self.failed is not None:
            raise self.failed
        came: list[tuple[str, Raw]] = []
        for key, result in self.runner.run(self._some()):
            if isinstance(result, Raw):
                came.append((key, result))
            else:
                self.failed = self.failed or result
        if self.failed is not None and not came:
            raise self.failed
        return came

    async def _some(self) -> list[tuple[str, Raw | Exception]]:
        found = [await self.done.get()]
        while not self.done.empty():
            found.append(self.done.get_nowait())
        return found

    def close(self) -> None:
        """End the requests in flight and the connection."""
        for task in self.tasks:
            task.cancel()
        self.runner.run(self.client.close())
        self.runner.close()


def _checked_url(url: str) -> str:
    """The URL without a slash at the end. Raises UserError where it is none of a server's with its /v1."""
    try:
        parts = urlsplit(url)
        credentials = parts.username or parts.password
        place = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise UserError("the server's URL cannot be read; it looks like http://127.0.0.1:8000/v1") from None
    if credentials:
        raise UserError(f"the server's URL holds a user name or password; put the key into {KEY} instead")
    if not place or parts.query or parts.fragment or not parts.path.rstrip("/").endswith("/v1"):
        raise UserError(f"{url}: is no URL of a server; it looks like http://127.0.0.1:8000/v1")
    return url.rstrip("/")


def _key() -> str:
    key = os.environ.get(KEY, "").strip() or "none"
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(f"{KEY}: holds a character that no key has")
    return key


def _retry_after(error: openai.APIStatusError) -> float:
    """Seconds that the server asks for, at most a minute; 0 where it asks for none."""
    asked = error.response.headers.get("retry-after", "")
    return min(float(asked), 60.0) if asked.isdigit() else 0.0
