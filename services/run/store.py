"""Which file of a run is which: the only place that knows their names."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.run_dir import RunDir
from services.run import records
from services.run.files import Document, Lines


@dataclass(frozen=True)
class RunStore:
    """The files of one run. Cheap to make; nothing is read before it is asked for."""

    run: RunDir

    @property
    def metrics(self) -> Lines[records.Step]:
        return Lines(self.run.metrics, records.Step)

    @property
    def trained(self) -> Lines[records.TrainedStep]:
        return Lines(self.run.trained, records.TrainedStep)

    @property
    def attempts(self) -> Lines[records.Attempt]:
        return Lines(self.run.attempts, records.Attempt)

    @property
    def policy_versions(self) -> Lines[records.PolicyVersion]:
        return Lines(self.run.path / "policy_versions.jsonl", records.PolicyVersion)

    @property
    def pushes(self) -> Lines[records.Push]:
        return Lines(self.run.path / "pushes.jsonl", records.Push)

    @property
    def rollouts(self) -> Lines[records.Rollout]:
        return Lines(self.run.rollouts / "index.jsonl", records.Rollout)

    @property
    def sandboxes(self) -> Lines[records.SandboxEvent]:
        return Lines(self.run.ledger, records.SandboxEvent)

    @property
    def cells(self) -> Lines[records.Cell]:
        return Lines(self.run.eval / "cells.jsonl", records.Cell)

    @property
    def collapse_alarms(self) -> Lines[records.CollapseAlarm]:
        return Lines(self.run.eval / "collapse_alarms.jsonl", records.CollapseAlarm)

    @property
    def manifest(self) -> Document[records.Manifest]:
        return Document(self.run.manifest, records.Manifest)

    @property
    def result(self) -> Document[records.Result]:
        return Document(self.run.result, records.Result)

    @property
    def stop_request(self) -> Document[records.StopRequest]:
        return Document(self.run.stop_request, records.StopRequest)

    @property
    def costs(self) -> Document[records.Costs]:
        return Document(self.run.path / "costs.json", records.Costs)

    @property
    def tracker(self) -> Document[records.TrackerPosition]:
        return Document(self.run.path / "tracker.json", records.TrackerPosition)

    def heartbeat(self, service: str) -> Document[records.Heartbeat]:
        return Document(self.run.heartbeats / service, records.Heartbeat)
