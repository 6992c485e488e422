"""Small folders of runs and evaluations, written by hand, for tests of reports."""

import yaml

from rl_caption.data.files import write_json, write_json_lines

NASTY = """</script><script>alert("1")</script> & 'two' <img src=x onerror=alert(3)> <!-- \u2028"""
DATA = {
    "format": "scenes",
    "kwargs": {
        "num_train": 4,
        "num_val": 30,
        "num_test": 30,
        "num_unseen": 0,
        "image_size": 32,
    },
}
STEPS = (0, 10, 20)


def _validation(step, cider, reward, judge):
    judges = {"val/judge/rouge_l": judge, "hacking/alarm": float(step == 20)}
    return {"step": step, "val/cider": cider, "val/reward": reward, **judges}


def _step(step, total, lclip, entropy):
    rewards = {"reward/total": total, "reward/lclip": lclip}
    return {"step": step, **rewards, "policy/entropy": entropy, "time/step": 0.25}


LINES = [
    _validation(0, 1.25, 0.5, 0.4375),
    _step(1, 0.125, 0.25, 1.5),
    _step(10, 0.75, 0.8, 1.0625),
    _validation(10, 1.75, 0.625, 0.5625),
    _step(20, 0.875, 0.9, 0.1),
    _validation(20, 0.75, 0.96875, 0.3125),
]
EVIDENCE = "the judge rouge_l, which is not in the reward, fell from 0.4375 to 0.3125 (-28.6%, 4.0 standard errors)"
STATE = {
    "global_step": 20,
    "metric": "val/cider",
    "best_metric": 1.75,
    "best_step": 10,
    "stopped": None,
    "notes": {"hacking": {"first_alarm": {"step": 20, "evidence": [EVIDENCE]}}},
}


def write_captions(folder, split, captions):
    """Write captions of the first images of a split of the generated world."""
    rows = []
    for index, caption in enumerate(captions):
        rows.append({"image_id": f"{split}-{index:06d}", "caption": caption})
    write_json(folder / "predictions.json", rows)


def write_run(folder, **config):
    """Write a finished run with three validations, the last with an alarm; the first
    caption has HTML to be escaped.
    """
    folder.mkdir(parents=True)
    values = {
        "data": DATA,
        "eval": {"split": "val"},
        "reward": {"terms": {"lclip": {"weight": 0.5}, "brevity": {"weight": 0.5}}},
        "train": {"max_steps": 20},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values | config))
    env = {"python": "3.12.1", "platform": "Linux", "versions": {"torch": "2.12"}}
    env |= {"signature": "SIG+x", "processes": 1, "command": ["scripts/scst.py"]}
    write_json(folder / "env.json", env)
    write_lines(folder, LINES)
    write_json(folder / "result.json", STATE)
    for step, word in zip(STEPS, ("small", "large", "large large"), strict=True):
        captions = [f"there is a {word} red square {index}" for index in range(30)]
        captions[0] = f"{NASTY} {step}"
        place = folder / "eval" / f"step-{step:08d}"
        place.mkdir(parents=True)
        write_captions(place, "val", captions)
    return folder


def write_lines(folder, lines):
    """Write the log of a run."""
    write_json_lines(folder / "metrics.jsonl", lines)


def write_evaluation(folder, cider, word="red", **more):
    """Write an evaluation of 30 captions, as ``rl-caption evaluate`` does."""
    folder.mkdir(parents=True)
    metrics = {"CIDEr": cider, "BLEU-4": cider / 4, "length/mean": 6.0}
    metrics["judge/L-CLIPS"] = cider / 2
    scores = {"metrics": metrics, "signature": "SIG", "n": 30}
    scores["left_out"] = {"SPICE": "no <b>jar</b>"}
    write_json(folder / "scores.json", scores | more)
    write_captions(folder, "test", [f"a {word} square"] * 30)
    write_json(folder / "settings.json", {"data": DATA, "split": "test"})
    return folder


def write_comparison(folder):
    """Write a comparison of two systems, as ``rl-caption evaluate`` does."""
    for name, cider in (("xe", 1.0), ("rl", 1.25)):
        write_evaluation(folder / name, cider, name)
    found = {"first": 1.0, "second": 1.25, "difference": 0.25}
    found |= {"interval": [0.125, 0.375], "p": 0.001}
    content = {"systems": ["xe", "rl"], "resamples": 1000, "seed": 0}
    content["differences"] = {"CIDEr": found}
    write_json(folder / "comparison.json", content)
    return folder
