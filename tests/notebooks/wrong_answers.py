"""For each exercise answers that many give and that its check must refuse; run in the lesson's own kernel.

An answer, or a pair: the answer, and words that the refusal must have.
"""

from lessons import NAMES

ONE, TWO, SHARDING, SAVING, BACKUP, PERFORMANCE, MANY = NAMES

WRONG_ANSWERS = {
    ONE: {
        "images": ["check_images_shown(STEPS_PER_EPOCH * BATCH_SIZE)", 'check_images_shown("13440")'],
        "rate": ['check_rate("higher")', 'check_rate("Lower")'],
        "accuracy": [
            "check_accuracy(lambda logits, labels: np.sum(logits.argmax(axis=1) == labels))",
            "check_accuracy(lambda logits, labels: np.mean(logits.argmax(axis=0) == labels))",
        ],
    },
    TWO: {
        "images": ["check_images(70 * 64)", "check_images([17920])"],
        "config": ['check_config({"cluster": repaired, "task": {"type": "worker", "index": 0}})'],
        "batch": [
            'check_arguments(["--epochs", 1, "--steps-per-epoch", 20, "--per-worker-batch-size", 64])',
            'check_arguments(["--epochs", 1, "--steps-per-epoch", 20, "--batch-size", 32])',
            ('check_arguments(["--epochs", 2, "--steps-per-epoch", 20, "--per-worker-batch-size", 32])', "1 epoch of 20"),
        ],
    },
    SHARDING: {
        "steps": ["check_steps(4000 // 64, 4000 % 64)", 'check_steps("20", 160)'],
        "shard": [
            "check_part(lambda ids, context: ids.shuffle(36).shard(3, context.input_pipeline_id).batch(4))",
            "check_part(lambda ids, context: ids.shard(3, context.input_pipeline_id))",
            "check_part(lambda ids, context: ids.shard(3, context.input_pipeline_id).repeat().batch(4))",
        ],
        "policy": [
            'check_policy(lambda files, workers: "FILE" if files >= workers else "DATA")',
            'check_policy(lambda files, workers: "file" if files and files % workers == 0 else "data")',
        ],
    },
    SAVING: {
        "steps": ["check_step_count(80)"],
        "seen": ["check_brightness(brightness[0])", "check_brightness(brightness)"],
        "chief": [
            'check_is_chief(lambda config: not config or config["task"]["index"] == 0)',
            'check_is_chief(lambda c: c["task"]["index"] == 0 and c["task"]["type"] == [*sorted(c["cluster"])][0])',
        ],
    },
    BACKUP: {
        "lost": ["check_lost(4640)"],
        "freq": ["check_save_freq(STEPS_PER_EPOCH)", "check_save_freq(2.5)"],
        "cost": ["check_best_n(lambda step, backup, mtbf: (backup * mtbf) ** 0.5 / step)"],
    },
    PERFORMANCE: {
        "bytes": ["check_bytes(204.8)", 'check_bytes("153.6")'],
        "efficiency": ["check_efficiency(lambda *case: 1 - solution(*case))"],
        "noise": ["check_noise(np.median(after) / np.median(before))", "check_noise(np.array(after) / np.array(before))"],
    },
    MANY: {
        "ports": ['check_ports((5, "n3"))', "check_ports(5)"],
        "diagnose": [
            'check_diagnoses({"A": "never starts", "B": "seed", "C": "killed"})',
            'check_diagnoses({"A": "Firewall", "B": "seed", "C": "killed"})',
        ],
        "workers": [
            'check_workers(lambda names, counts, port: [f"{n}:{port}" for n, c in zip(names, counts) for _ in range(c)])',
            'check_workers(lambda names, counts, port: [f"{names[0]}:{port + i}" for i in range(sum(counts))])',
        ],
    },
}

# The check refuses by an assertion with words; anything else fails the cell.
CELL = """\
try:
    {answer}
except AssertionError as refusal:
    assert len(str(refusal)) > 10, "refused without a word"
    assert {words!r} in str(refusal), f"refused in other words: {{refusal}}"
else:
    raise SystemError("a wrong answer was accepted")
"""
