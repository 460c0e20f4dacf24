"""Logs: one JSON object a line, bound context, and nothing secret whatever a caller passes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from coordinator.logs import set_up_logging, without_passwords
from pooler.demo.etcd import Etcd
from pooler.observe.events import Event
from tests.coordinator.parts import coordinator, log_events, make_spec


@pytest.fixture(autouse=True)
def structlog_as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_line_with_its_bound_context(stream: io.StringIO) -> None:
    set_up_logging(stream=stream)
    structlog.get_logger().bind(worker="w0").info(Event.SESSION_OPENED, permit="s-3", reason="a\nb")
    (line,) = lines(stream)
    assert line["event"] == "session_opened"
    assert (line["worker"], line["permit"], line["reason"], line["level"]) == ("w0", "s-3", "a\nb", "info")
    assert line["timestamp"].endswith("Z")


def test_a_traceback_stays_on_its_events_line(stream: io.StringIO) -> None:
    set_up_logging(stream=stream)
    try:
        raise ValueError("boom")
    except ValueError:
        structlog.get_logger().exception(Event.SOMETHING_FAILED)
    (line,) = lines(stream)
    assert "ValueError: boom" in line["exception"]


def test_levels_below_the_set_one_are_not_written(stream: io.StringIO) -> None:
    set_up_logging(stream=stream, level="warning")
    structlog.get_logger().info(Event.SESSION_OPENED)
    structlog.get_logger().warning(Event.SESSION_LOST)
    assert [line["event"] for line in lines(stream)] == ["session_lost"]


@pytest.mark.parametrize("name", ["password", "Password", "monitor_password", "secret", "http_token",
                                  "cancel_key", "client_secret", "scram_verifier", "query", "sql"])
@pytest.mark.parametrize("form", ["json", "console"])
def test_secrets_and_query_text_never_come_out(stream: io.StringIO, form: Any, name: str) -> None:
    set_up_logging(stream=stream, form=form)
    structlog.get_logger().info("x", **{name: "hunter2"}, nested={"a": [{name: "hunter2"}]})
    assert "hunter2" not in stream.getvalue()


def test_query_text_is_let_through_when_asked_for(stream: io.StringIO) -> None:
    set_up_logging(stream=stream, queries=True)
    structlog.get_logger().info("x", query="select 1", password="hunter2")
    assert lines(stream)[0]["query"] == "select 1"
    assert "hunter2" not in stream.getvalue()


@pytest.mark.parametrize(
    "text",
    ["postgres://u:hunter2@h/d", "host=h password=hunter2 user=u", "password='hunter2 x' user=u",
     "connect to postgresql://u:hunter2@[::1]:5432/d failed"],
)
def test_passwords_inside_of_texts_are_hidden(text: str) -> None:
    assert "hunter2" not in without_passwords(text)
    assert "u" in without_passwords(text)


def test_the_console_form_writes_one_line_an_event(stream: io.StringIO) -> None:
    set_up_logging(stream=stream, form="console")
    structlog.get_logger().info("x", reason="a\nb")
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.etcd
async def test_the_coordinator_logs_in_the_form_and_from_the_level_that_the_config_says_also_after_a_reload(
    tmp_path: Path, etcd: Etcd, etcd_prefix: str
) -> None:
    spec = make_spec(tmp_path, hosts=["127.0.0.1:1"], endpoints=list(etcd.endpoints), prefix=etcd_prefix)
    spec["log"] = {"format": "console", "level": "warning"}
    written = tmp_path / "coordinator.log"
    async with coordinator(spec) as supervisor:
        await supervisor.serving()
        assert "coordinator_started" not in written.read_text()
        assert log_events(tmp_path) == []
        spec["log"] = {"format": "json", "level": "info"}
        await supervisor.link.call("reload")
        supervisor.process.terminate()
        with trio.fail_after(10):
            await trio.to_thread.run_sync(supervisor.process.wait)
        events = [line["event"] for line in log_events(tmp_path)]
        assert "coordinator_stopping" in events
        assert "coordinator_starts_anew" not in events  # nobody was disturbed for it
