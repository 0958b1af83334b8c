"""perfbench: a number is published only with its proof.

From Python: ``perfbench.load(PATH...)`` gives runs as a pandas DataFrame. It loads on first use, so
that the command line waits for no pandas.

Where things are, in the order of a run:

- Commands: ``cli`` (and ``cli_options``) parse, ``session``, ``check``, ``versions`` (ab, compare),
``reread``, ``tracecommand`` and
  ``tune`` (``cli_tune``, ``tuneplan``, ``tunedecide`` by ``crossing``, ``tunetext``) do.
- What to measure: ``matrix`` (``matrixfile``, ``matrixrules``, ``axes``, ``yamlfile``, ``policy``),
``calls``, ``plan``, ``environment``
  (``source``, ``gpu``, ``nvml``), ``doctor`` (``doctor_*``, ``findings``).
- Measuring, parent: ``runner``, ``sweep``, ``ledger``, ``resumable``, ``progress``, ``isolate``,
``children``; two versions in turns:
  ``ab``, ``pair``, ``checkout``, ``side``, ``sideplan``, ``recheck``.
- Measuring, child: ``forkserver``, ``job``, ``measure``, ``workload`` (``cached``,
``attention_only``, ``selected_only`` on
  ``selections``, ``stepped``), ``sentinels``, ``timing``, ``clock``, ``telemetry``, ``tuning``;
  the proof: ``parity`` (``deviation``, ``layer_parity``, ``cache_parity``, ``blocks_parity``,
  ``selected_parity``), ``witness``,
  ``physics``, ``floors``.
- What was measured: ``result``, ``runfile``, ``frame``, ``baseline`` (``baselinefile``),
``verdict``.
- Judging, pure: ``gate`` = ``coverage``, ``hardgate``, ``comparable``, then ``speed`` (stage 1) and
``settle`` (stage 2) on ``reduced``
  rows, by ``stats`` and ``modes``, told as ``evidence`` and ``judgement``;
  ``compare``, ``explain``; ``calibrate`` with ``starts``, ``realpairs``, ``nights``, ``certify``
  and
  ``nullsim``.
- Telling: ``report`` (``report.kernels`` writes reports/kernels.md), ``text``, ``revisions``,
``github``; after a red ``trace`` with
  ``capture``, ``kernels``, ``kerneldiff``, ``tracediff``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfbench.frame import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    if name != "load":
        raise AttributeError(
            f"module 'perfbench' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    from perfbench.frame import load

    return load
