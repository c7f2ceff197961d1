"""Print the tables of all numbers in `reading_the_dials.md`, from the monitor's cards.

KERAS_BACKEND=jax python docs/dial_table.py
"""

from keras_secondorder.callbacks import cards


def tables() -> str:
    """One Markdown table for each group."""
    groups = {
        "Step": {
            **cards.STEP,
            "time_share/...": cards.TIME_SHARE,
            "time_share/monitor": cards.MONITOR_SHARE,
        },
        "Layers": {**cards.FACTOR, **cards.LAYER},
        "Network": cards.NETWORK,
    }
    parts = []
    for group, entries in groups.items():
        rows = [f"| `{name}` | {text} |" for name, text in entries.items()]
        parts.append("\n".join([f"| {group} | Meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(tables())
