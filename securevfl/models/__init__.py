"""Encoders, perturbed layers, fusion and heads, and the mathematics that comes with them."""

from securevfl.models.bounds import layer_bounds
from securevfl.models.build import ENCODERS, EncoderSpec, build_encoder, initialise, seeded
from securevfl.models.checks import check_encoder, couples_records, evaluate
from securevfl.models.devices import DEVICES, pick_device
from securevfl.models.encoders import CNNEncoder, LinearEncoder, LSTMEncoder, MLPEncoder, PreparedLinear
from securevfl.models.files import load_module, save_module
from securevfl.models.fusion import FUSIONS, Fusion
from securevfl.models.heads import HEADS, SumHead, build_head
from securevfl.models.layers import ACTIVATIONS, HiddenLayer, LSTMLayer
from securevfl.models.losses import (
    TASKS,
    area_under_curve,
    decisions,
    metrics,
    output_width,
    predictions,
    task_loss,
)
from securevfl.models.per_record import clipped_gradient_sum
from securevfl.models.perturbed import HiddenNoise, NoiseSource, Perturbed, drawn_noise, perturb, replaying
from securevfl.models.smoothness import (
    LayerBound,
    Smoothness,
    activation_rms,
    objective_gap,
    objective_gap_as_printed,
    smoothness,
    smoothness_as_printed,
)
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
    "LayerBound",
    "LinearEncoder",
    "MLPEncoder",
    "NoiseSource",
    "Perturbed",
    "PreparedLinear",
    "Smoothness",
    "StackedEncoders",
    "SumHead",
    "activation_rms",
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
    "layer_bounds",
    "load_module",
    "metrics",
    "objective_gap",
    "objective_gap_as_printed",
    "output_width",
    "perturb",
    "pick_device",
    "predictions",
    "replaying",
    "save_module",
    "seeded",
    "smoothness",
    "smoothness_as_printed",
    "task_loss",
    "why_not_stackable",
]
