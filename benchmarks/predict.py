"""What the model of several GPUs says of a run on four, before that is made:
python benchmarks/predict.py [GPU]

From the newest run of ddp.py on two GPUs of the same kind (gpuaccel/learn/planning.py). Written to
benchmarks/predictions/<gpu>.json; docs/planning.md shows it beside what was measured later.
"""

import datetime
import json
import sys

from common import RESULTS, ROOT, commit, folder_of

from gpuaccel.learn import planning

GPUS = 4
PREDICTIONS = ROOT / "benchmarks" / "predictions"


def main():
    gpu = sys.argv[1] if len(sys.argv) > 1 else None
    known = planning.calibrated(gpu, (2,))
    if known is None:
        sys.exit("no run of ddp.py on two GPUs is recorded")
    folder = folder_of(known.gpu)
    pair = json.loads((RESULTS / folder / "ddp_2gpus.json").read_text())
    workload = known.workload
    content = {
        "gpu": known.gpu,
        "written": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "from": {key: pair[key] for key in ("commit", "date", "gpus", "driver", "torch")},
        "one_gpu_ms": {"4": workload.step_ms, "1": workload.micro_ms + workload.tail_ms},
        "ms": planning.predicted_rows(known, GPUS),
    }
    path = PREDICTIONS / f"{folder}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
