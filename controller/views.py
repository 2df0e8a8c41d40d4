"""What selection is told about each rank, out of what the incident knows."""

from __future__ import annotations

from collections.abc import Mapping

from lastwords.controller.decision import NO_TARGETS, RankView
from lastwords.controller.membership import Life, Membership
from lastwords.controller.saving import Saving
from lastwords.vocabulary import Settled


def rank_views(
    membership: Membership,
    saving: Saving,
    settled: Mapping[int, Settled],
    excluded: Mapping[int, str],
) -> dict[int, RankView]:
    """A view of every registered rank. excluded: living ranks that are not waited for any more, and why."""
    views = {}
    for rank, member in membership.members.items():
        stand, absence = None, ""
        if not member.living:
            absence = member.death
        elif rank in excluded:
            absence = excluded[rank]
        elif member.life is Life.ALIVE and rank in settled:
            stand = settled[rank].stand
        refused = frozenset(saving.refused.get(rank, NO_TARGETS))
        may_copy = rank not in saving.cannot_copy
        shared = member.shared if saving.shares else ()
        host_id = member.process.host_id
        copies = frozenset(saving.copies.get(rank, ()))
        views[rank] = RankView(rank, host_id, member.units, stand, absence, refused, may_copy, shared, copies)
    return views
