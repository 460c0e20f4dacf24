"""The part of `pooler plan` about a load test: workers and hosts that are needed when a zone is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from coordinator.bounded_yaml import read_yaml, text_within
from coordinator.yaml_faults import yaml_fault
from pooler.capacity import Sample, Workers, Zones, naive, planned, tested_tps
from pooler.cli.options import seconds_of
from pooler.errors import PoolerError, UsageFault
from pooler.settings_units import parse_duration_seconds


class NoPointFits(PoolerError):
    """No point of the load test is within the limits: nothing can be planned on it."""


@dataclass(frozen=True, slots=True)
class ZonePlan:
    """Workers by the test alone, and with the loss of zones and the headroom taken into account."""

    zones: Zones
    tested: Fraction
    naive: Workers
    planned: Workers
    workers_per_host: int

    @property
    def hosts(self) -> int:
        """Each zone has hosts of its own."""
        return ceil(self.planned.per_zone / self.workers_per_host) * self.zones.count

    @property
    def spare_tps(self) -> Fraction:
        """Below the headroom, with the zones lost."""
        return self.planned.left_tps - self.zones.forecast_tps

    def as_json(self) -> dict[str, Any]:
        return {
            "tested_tps": float(self.tested), "forecast_tps": float(self.zones.forecast_tps),
            "zones": self.zones.count, "lost": self.zones.lost, "headroom": float(self.zones.headroom),
            "naive": {"workers": self.naive.count, "left_tps": float(self.naive.left_tps)},
            "planned": {"workers": self.planned.count, "workers_per_zone": self.planned.per_zone,
                        "hosts": self.hosts, "left_tps": float(self.planned.left_tps),
                        "spare_tps": float(self.spare_tps)}}

    def lines(self) -> list[str]:
        zones, short = self.zones, self.naive.left_tps < self.zones.forecast_tps
        lost = f"with {zones.lost} of {zones.count} zones lost"
        return [
            "workers",
            f"  one worker was tested at {_number(self.tested)} tps; the forecast is "
            f"{_number(zones.forecast_tps)} tps",
            f"  by the test alone: {self.naive.count} workers; {lost} they carry "
            f"{_number(self.naive.left_tps)} tps" + (": too little" if short else ""),
            f"  planned: {self.planned.count} workers, {self.planned.per_zone} in each zone, on {self.hosts} "
            f"hosts of {self.workers_per_host}",
            f"  {lost} they carry {_number(self.planned.left_tps)} tps at {_number(zones.headroom * 100)} % "
            f"of what was tested: {_number(self.spare_tps)} tps spare"]


def zone_plan(
    measured: Path | None, forecast: str | None, growth: str, zones: int, lose: int, headroom: str, p99: str,
    errors: str, workers_per_host: int,
) -> ZonePlan | None:
    """None where no load test is given. Raises UsageFault, NoPointFits."""
    if measured is None and forecast is None:
        return None
    if measured is None or forecast is None:
        raise UsageFault("--measured FILE and --forecast N go together")
    if lose >= zones:
        raise UsageFault(f"--lose {lose} of --zones {zones}: none would be left")
    used = _ratio("--headroom", headroom, above=0)
    if used > 1:
        raise UsageFault(f"--headroom {headroom}: more than a worker was tested at; write 0.7 for 70 %")
    peak = _ratio("--forecast", forecast, above=0) * _ratio("--growth", growth, above=0)
    asked = Zones(Fraction(ceil(peak)), zones, lose, used)
    samples = read_samples(measured)
    tested = tested_tps(samples, seconds_of("--p99", p99), float(_ratio("--errors", errors)))
    if not tested:
        raise NoPointFits(f"{measured}: none of {len(samples)} points has p99 <= {p99} and errors <= "
                          f"{errors}: test with less load, or allow more")
    return ZonePlan(asked, tested, naive(asked, tested), planned(asked, tested), workers_per_host)


def read_samples(path: Path) -> list[Sample]:
    """The points of a load test. Raises UsageFault with every fault of the file."""
    try:
        rows = read_yaml(text_within(path))
    except (OSError, UnicodeDecodeError) as fault:
        raise UsageFault(f"--measured {path}: {getattr(fault, 'strerror', None) or 'not UTF-8'}") from None
    except yaml.YAMLError as fault:
        raise UsageFault(f"--measured {path}: {yaml_fault(fault)}") from None
    if not isinstance(rows, list) or not rows:
        raise UsageFault(f"--measured {path}: a list is expected, as "
                         "[{tps: 200, p99: 220ms, errors: 0.0003}]")
    faults: list[str] = []
    samples = [_sample(row, number, faults) for number, row in enumerate(rows, 1)]
    if faults:
        raise UsageFault(f"--measured {path}: " + "; ".join(faults))
    return [sample for sample in samples if sample is not None]


def _sample(row: object, number: int, faults: list[str]) -> Sample | None:
    if not isinstance(row, dict) or set(row) != {"tps", "p99", "errors"}:
        faults.append(f"point {number} is not {{tps, p99, errors}}")
        return None
    read: list[tuple[str, Callable[[Any], Any]]] = [
        ("tps", _positive), ("p99", parse_duration_seconds), ("errors", _share)]
    values = []
    for name, parse in read:
        try:
            values.append(parse(row[name]))
        except (ValueError, TypeError, ArithmeticError) as fault:
            faults.append(f"{name} of point {number}: {fault}")
    return Sample(*values) if len(values) == len(read) else None


def _positive(value: object) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{value!r} is not a number above 0")
    return Fraction(str(value))


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{value!r} is not a ratio from 0 to 1")
    return float(value)


def _ratio(option: str, text: str, above: float = -1) -> Fraction:
    try:
        value = Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        raise UsageFault(f"{option} {text}: not a number") from None
    if value < 0 or value <= above:
        raise UsageFault(f"{option} {text}: must be above 0" if above >= 0 else f"{option} {text}: below 0")
    return value


def _number(value: Fraction) -> str:
    return f"{float(value):,.6g}" if value.denominator > 1 else f"{value.numerator:,}"
