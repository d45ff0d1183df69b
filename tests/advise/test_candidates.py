"""Which ways to train are compared on a cluster."""

from __future__ import annotations

from advise.clusters import cluster
from paceline.advise.candidates import DDP, candidates


def test_only_unequal_workers_get_candidates_with_tuned_batches() -> None:
    assert not any("tune_batches" in each.policy for each in candidates(cluster(0.1)))
    assert any("tune_batches" in each.policy for each in candidates(cluster(0.1, slow=3.0)))


def test_one_worker_has_no_candidate_with_all_reduce_or_colocated_servers() -> None:
    assert all(each.policy != DDP and not each.colocated for each in candidates(cluster(0.1, workers=1)))


def test_every_bound_of_dssp_is_tried() -> None:
    """On unequal workers, the default is as slow as SSP, so the other two must be in the table."""
    tried = {each.policy for each in candidates(cluster(0.1))}
    assert {"dssp", "dssp:bound=staleness", "dssp:bound=none"} <= tried


def test_few_groups_are_streamed_only_if_there_are_more_workers() -> None:
    def groups(workers: int) -> list[str]:
        tried = candidates(cluster(0.1, workers=workers))
        return [each.policy for each in tried if each.streamed and each.colocated and "groups" in each.policy]

    assert groups(2) == []
    assert groups(3) == ["r2sp:groups=2"]
    assert groups(8) == ["r2sp:groups=2", "r2sp:groups=3"]
