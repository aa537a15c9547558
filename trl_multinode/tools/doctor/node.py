"""All examinations of this node."""

import socket
from collections.abc import Callable

from msgspec.structs import replace

from ...run.versions import local_versions
from .case import Case
from .cores import examine_cores, examine_limits, examine_memory
from .facts import Fact, Finding, NodeReport, Results
from .gpus import count_gpus, examine_gpus
from .models import examine_dataset, examine_hub, examine_model
from .network import examine_address, examine_names, examine_variables, nic_towards
from .redaction import hide_secrets
from .software import examine_launch, examine_tracker, examine_versions
from .storage import examine_disks, examine_shared_memory

Examination = Callable[[Case], Results]

EXAMINATIONS: tuple[Examination, ...] = (
    examine_launch,
    examine_gpus,
    examine_cores,
    examine_memory,
    examine_shared_memory,
    examine_disks,
    examine_limits,
    examine_address,
    examine_names,
    examine_variables,
    examine_versions,
    examine_tracker,
    examine_model,
    examine_dataset,
    examine_hub,
)


def examine(case: Case, examinations: tuple[Examination, ...] = EXAMINATIONS) -> NodeReport:
    """Examine this node.

    Args:
        case ([`Case`]):
            Launch on this node.
        examinations (`tuple`, *optional*):
            Functions that yield facts and findings; an exception in one becomes a warning.

    Returns:
        [`NodeReport`]: all facts and findings, errors first.
    """
    nic = nic_towards(case) if case.many_nodes else None
    report = NodeReport(rank=case.rank, host=socket.gethostname(), versions=local_versions())
    report.nic, report.address = (nic.name, nic.address) if nic else ("", "")
    report.gpus = count_gpus(case)
    for found in (one for examination in examinations for one in _safely(examination, case)):
        # before another node sees it, which does not know this one's secrets
        if isinstance(found, Fact):
            report.facts.append(replace(found, value=hide_secrets(found.value, case.environ)))
        else:
            report.findings.append(replace(found, what=hide_secrets(found.what, case.environ)))
    report.findings.sort(key=lambda finding: finding.severity != "error")
    return report


def _safely(examination: Examination, case: Case) -> Results:
    """Yield what an examination finds; a machine may refuse any look, and the others must go on."""
    try:
        yield from examination(case)
    except Exception as error:
        about = examination.__name__.removeprefix("examine_").replace("_", " ")
        yield Finding(
            "warning",
            about,
            f"this part of the node could not be examined ({type(error).__name__}: {error})",
            "report this as an issue, with `--paste`",
        )
