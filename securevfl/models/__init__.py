"""Encoders, perturbed layers, fusion and heads, and the mathematics that comes with them."""

from securevfl.models.build import (
    DEVICES,
    ENCODERS,
    EncoderSpec,
    build_encoder,
    check_encoder,
    couples_records,
    evaluate,
    initialise,
    pick_device,
    seeded,
)
from securevfl.models.encoders import (
    ACTIVATIONS,
    CNNEncoder,
    HiddenLayer,
    LinearEncoder,
    LSTMEncoder,
    LSTMLayer,
    MLPEncoder,
    PreparedLinear,
)
from securevfl.models.files import load_module, save_module
from securevfl.models.heads import FUSIONS, HEADS, Fusion, SumHead, build_head
from securevfl.models.losses import (
    TASKS,
    area_under_curve,
    decisions,
    metric_names,
    metrics,
    output_width,
    predictions,
    task_loss,
)
from securevfl.models.per_record import clipped_gradient_sum
from securevfl.models.perturbed import HiddenNoise, NoiseSource, Perturbed, drawn_noise, perturb, replaying
from securevfl.models.stacked import StackedEncoders, why_not_stackable

__all__ = [
    "ACTIVATIONS",
    "DEVICES",
    "ENCODERS",
    "FUSIONS",
    "HEADS",
    "TASKS",
    "CNNEncoder",
    "EncoderSpec",
    "Fusion",
    "HiddenLayer",
    "HiddenNoise",
    "LSTMEncoder",
    "LSTMLayer",
    "LinearEncoder",
    "MLPEncoder",
    "NoiseSource",
    "Perturbed",
    "PreparedLinear",
    "StackedEncoders",
    "SumHead",
    "area_under_curve",
    "build_encoder",
    "build_head",
    "check_encoder",
    "clipped_gradient_sum",
    "couples_records",
    "decisions",
    "drawn_noise",
    "evaluate",
    "initialise",
    "load_module",
    "metric_names",
    "metrics",
    "output_width",
    "perturb",
    "pick_device",
    "predictions",
    "replaying",
    "save_module",
    "seeded",
    "task_loss",
    "why_not_stackable",
]
