"""benchmarks/quantisation.py: what is timed needs no calibration text, and what is left to run."""

from benchmarks import quantisation


def test_every_method_has_a_form_to_be_timed_without_calibration() -> None:
    for name, method in quantisation.methods().items():
        if isinstance(method, quantisation.Turned):  # as fast as what it turns
            continue
        timed = quantisation.nearest(method)
        assert not timed.calibrated, name
        bits = lambda m: (m.format_for((128, 256)).bits, m.format_for((128, 256)).group)
        assert bits(timed) == bits(method), name


def test_qualities_and_speeds_are_counted_apart() -> None:
    quality = {"benchmark": "quantisation", "method": "RTN 4"}
    speed = {"benchmark": "quantisation-speed", "ratios": {"float32": {}, "NVFP4": {}}}
    of = lambda speeds: [quantisation.names_in(line, speeds) for line in (quality, speed)]
    assert of(False) == [("RTN 4",), ()] and of(True) == [(), ("float32", "NVFP4")]
