"""Ctrl-C: the cleanup is not cut short, and the message says what was written and how to continue."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli.interruption import Interrupted, stop_signals, stopped_job
from paceline.model import checkpoint
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.job_options import JobOptions


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_stops_a_task_and_later_ones_do_not_disturb_its_cleanup(
    sent: signal.Signals, code: int
) -> None:
    cleaned: list[str] = []

    async def work() -> None:
        with stop_signals():
            try:
                os.kill(os.getpid(), sent)
                await asyncio.sleep(60)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.05)
                cleaned.append("all")
        raise AssertionError("not reached")

    async def work_and_clean() -> None:
        try:
            await work()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
            cleaned.append("the rest")

    with pytest.raises(Interrupted) as stopped:
        asyncio.run(work_and_clean())
    assert stopped.value.code == code
    assert cleaned == ["all", "the rest"]


def test_a_task_that_another_one_cancels_is_not_interrupted() -> None:
    async def work() -> None:
        with stop_signals():
            await asyncio.sleep(60)

    async def cancel() -> None:
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())


def test_a_job_without_a_checkpoint_says_that_nothing_can_be_continued() -> None:
    said = "Interrupted. The model was not saved; with --checkpoint FOLDER, a job can be continued."
    assert stopped_job(JobOptions(policy="asp")) == said
    assert stopped_job(JobOptions(policy="asp", shards=0)) == "Interrupted.", "there is no model"


def test_the_folder_to_resume_from_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def job(folder: Path) -> JobOptions:
        return JobOptions(policy="asp", saving=CheckpointPlan(folder, updates=1), record=tmp_path / "none")

    assert stopped_job(job(tmp_path / "none")) == "Interrupted. There was nothing to save yet."
    assert stopped_job(job(tmp_path)) == "Interrupted. There was nothing to save yet."
    monkeypatch.setattr(checkpoint, "newest", lambda _, quick: SimpleNamespace(version=120))
    trace = tmp_path / "trace.jsonl"
    trace.touch()
    assert stopped_job(job(tmp_path), trace) == (
        f"Interrupted. Written: {trace}. Continue the job from its checkpoint of version 120 with --resume {tmp_path}."
    )
