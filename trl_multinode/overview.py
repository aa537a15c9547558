"""The eight metrics to look at first, for the trackers and for the page of a run."""

from collections.abc import Mapping

# By name in a tracker, which sorts them; docs/operate/observe.md asks the questions in this order
OVERVIEW = {
    "1_reward": "reward",
    "2_groups_of_equal_rewards": "frac_reward_zero_std",
    "3_completion_tokens": "completions/mean_length",
    "4_clipped_completions": "completions/clipped_ratio",
    "5_logprob_difference": "sampling/sampling_logp_difference/mean",
    "6_seconds_per_step": "perf/step_s",
    "7_engines_busy": "engine/busy",
    "8_ranks_busy": "perf/rank_busy_share",
}


def overview(logs: Mapping[str, object]) -> dict[str, object]:
    """Return those that a log has, with the prefix under which trackers show them first."""
    return {f"at_a_glance/{name}": logs[key] for name, key in OVERVIEW.items() if key in logs}
