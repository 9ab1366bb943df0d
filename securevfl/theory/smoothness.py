"""How smooth hidden noise makes the objective, and how far it moves it (VAFL Theorem 5, appendix E.2).

The setting is eq. (10)-(11): u_l = sigma_l(W_l u_{l-1} + b_l + Z_l) for l = 1..L, the embedding is h = u_L,
the hidden Z_l are uniform on [-sqrt(3) c_l, sqrt(3) c_l]^{d_l}, Z_L is normal with standard deviation c_L per
coordinate, and F_c = E_Z loss(h). In this package the gate adds Z_L after clipping: the statements here then
hold for an affine last layer as long as the clip does not bite, since clipping is not smooth.

Both results are given twice: as bounds that hold, derived in the docstrings, and as printed in the paper. The
printed forms are kept to compare against and are not bounds; `smoothness_as_printed` and
`objective_gap_as_printed` say what is wrong with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from securevfl.errors import InputError


@dataclass(frozen=True, kw_only=True)
class LayerBound:
    """What the bounds need to know of one layer, valid on the whole (convex) set of weights considered.

    Attributes:
        width: d_l, the number of outputs.
        weight_norm: Upper bound on the spectral norm of W_l.
        level: c_l, the noise's standard deviation per coordinate.
        lipschitz: Lipschitz constant of the activation.
        bias_norm: Upper bound on |b_l|.
        offset: |sigma_l(0)|, zero for ReLU, tanh and the identity.
    """

    width: int
    weight_norm: float
    level: float
    lipschitz: float = 1.0
    bias_norm: float = 0.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise InputError(f"layer width is {self.width}; expected at least 1")
        for name in ("weight_norm", "level", "lipschitz"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"layer {name} is {value}; expected a positive number")
        for name in ("bias_norm", "offset"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"layer {name} is {value}; expected a number of at least 0")


@dataclass(frozen=True, kw_only=True)
class Smoothness:
    """Lipschitz constants of the gradient of F_c with respect to one party's parameters.

    Attributes:
        bias: For each layer's bias alone.
        weight: For each layer's weight alone.
        theta: For all of the party's parameters together, regulariser included.
    """

    bias: tuple[float, ...]
    weight: tuple[float, ...]
    theta: float


def activation_rms(layers: Sequence[LayerBound], input_rms: float) -> tuple[float, ...]:
    """Upper bounds on sqrt(E |u_l|^2) for l = 0..L-1, the inputs of the layers.

    By Minkowski's inequality and E |Z_l|^2 = d_l c_l^2:
    |u_l| <= |sigma_l(0)| + lambda_l (|W_l| |u_{l-1}| + |b_l| + |Z_l|) in the norm sqrt(E |.|^2).

    Args:
        layers: The layers, first to last.
        input_rms: Root of the mean of |x|^2 over the party's records.
    """
    _check_norms([input_rms])
    norms = [input_rms]
    for layer in layers[:-1]:
        noise = layer.level * math.sqrt(layer.width)
        reach = layer.weight_norm * norms[-1] + layer.bias_norm + noise
        norms.append(layer.offset + layer.lipschitz * reach)
    return tuple(norms)


def smoothness(
    layers: Sequence[LayerBound],
    norms: Sequence[float],
    *,
    loss_lipschitz: float = 1.0,
    regulariser: float = 0.0,
) -> Smoothness:
    """Bounds the smoothness of F_c in a party's parameters; the valid form of Theorem 5.

    Derivation. Write w_l, lambda_l for the norm bounds, a_l = W_l u_{l-1} + b_l, and Phi_l(v) for the loss
    averaged over Z_{l+1..L} given that layer l's perturbed pre-activation is v. Phi_l is K_l-Lipschitz with
    K_L = L_loss lambda_L and K_l = K_{l+1} w_{l+1} lambda_l.

    1. G_l(a) = grad E Phi_l(a + Z_l) is K_l kappa_l-Lipschitz in a, where kappa_l bounds the L1 distance of
       the densities of Z_l and Z_l + s by kappa_l |s|: for the cube of side 2 sqrt(3) c_l, 2 |s|_1 / side
       gives kappa_l = sqrt(d_l / 3) / c_l; for the Gaussian, kappa_L = sqrt(2 / pi) / c_L, without the
       dimension.
    2. grad_{b_l} F = E G_l(a_l) and grad_{W_l} F = E G_l(a_l) u_{l-1}^T. Move the parameters in direction
       (dW, db) and let p_l = dW_l u_{l-1} + db_l, so sqrt(E |p_l|^2) <= r_l |(dW_l, db_l)| with
       r_l^2 = E |u_{l-1}|^2 + 1. Then a_l moves by at most sum_{i <= l} (K_i / K_l) |p_i|, and at fixed a_l
       the later parameters move G_l by at most K_l sum_{j > l} (|dW_j| / w_j + kappa_j E |p_j|), by unrolling
       grad Phi_l(v) = sigma_l'(v)^T W_{l+1}^T G_{l+1}(W_{l+1} sigma_l(v) + b_{l+1}).
    3. Collecting terms (Cauchy-Schwarz in Z), the second derivative's block of layers i < l is at most
       B_il = K_i r_i (kappa_l r_l + 1 / w_l), and B_ll = K_l kappa_l r_l^2.

    The norm of the matrix B of block bounds bounds the whole. The loss need not be smooth itself.

    Args:
        layers: The layers, first to last.
        norms: sqrt(E |u_l|^2) for l = 0..L-1 over noise and records, or upper bounds such as
            `activation_rms`.
        loss_lipschitz: Lipschitz constant of the loss in this party's embedding.
        regulariser: Smoothness constant of the regulariser (the weight of an l2 term).
    """
    _check(layers, norms, loss_lipschitz=loss_lipschitz, regulariser=regulariser)
    reach = [loss_lipschitz * value for value in _gains(layers)]
    kappas = [math.sqrt(layer.width / 3) / layer.level for layer in layers[:-1]]
    kappas.append(math.sqrt(2 / math.pi) / layers[-1].level)
    roots = [math.hypot(norm, 1) for norm in norms]
    blocks = np.diag([k * kappa * root**2 for k, kappa, root in zip(reach, kappas, roots, strict=True)])
    for late in range(len(layers)):
        for early in range(late):
            bound = reach[early] * roots[early] * (kappas[late] * roots[late] + 1 / layers[late].weight_norm)
            blocks[early, late] = blocks[late, early] = bound
    bias = tuple(k * kappa for k, kappa in zip(reach, kappas, strict=True))
    weight = tuple(value * norm**2 for value, norm in zip(bias, norms, strict=True))
    return Smoothness(bias=bias, weight=weight, theta=float(np.linalg.norm(blocks, 2)) + regulariser)


def smoothness_as_printed(
    layers: Sequence[LayerBound],
    norms: Sequence[float],
    *,
    loss_lipschitz: float = 1.0,
    loss_smoothness: float = 0.0,
    embedding_lipschitz: float = 0.0,
    regulariser: float = 0.0,
) -> Smoothness:
    """Theorem 5 as printed, eq. (13). **Not a valid bound**; `bias` and `weight` are those of the embedding.

    What is wrong: L_w multiplies by E|u| where the second derivative carries |u|^2, and the constants of
    single blocks are added, which ignores mixed derivatives (a product of two weights has none within a
    block). L_b is valid but loose: its second term alone suffices, the first belongs to an argument that
    would need |W|^2; the uniform constant 2 sqrt(d) / c is that of a cube of side c, not 2 sqrt(3) c; the
    Gaussian one carries a needless d. The proof also treats E loss(h) like loss(E h).

    Args:
        layers: The layers, first to last.
        norms: E |u_l| for l = 0..L-1.
        loss_lipschitz: L^0 of the loss.
        loss_smoothness: Smoothness constant of the loss in the embedding.
        embedding_lipschitz: Lipschitz constant of the embedding in the parameters.
        regulariser: Smoothness constant of the regulariser.
    """
    _check(layers, norms, loss_lipschitz=loss_lipschitz, regulariser=regulariser)
    last = layers[-1]
    bias = [last.lipschitz * last.width / last.level]
    path = 1.0
    for layer, after in zip(reversed(layers[:-1]), reversed(layers[1:]), strict=True):
        path *= after.lipschitz * after.weight_norm
        own = 2 * math.sqrt(layer.width) * layer.lipschitz / layer.level
        bias.insert(0, bias[0] * after.weight_norm * layer.lipschitz**2 + path * own)
    weight = [norm * value for norm, value in zip(norms, bias, strict=True)]
    theta = (
        loss_smoothness * embedding_lipschitz**2 + loss_lipschitz * (sum(bias) + sum(weight)) + regulariser
    )
    return Smoothness(bias=tuple(bias), weight=tuple(weight), theta=theta)


def objective_gap(parties: Sequence[Sequence[LayerBound]], *, loss_lipschitz: float) -> float:
    """Bounds |F_c - F|, what the noise of all parties does to the objective; the valid form of appendix E.2.

    Derivation. One layer moves its output by at most lambda_l (|W_l| |change of u_{l-1}| + |Z_l|), so a
    party's embedding moves by at most sum_j T_j |Z_j| with T_j = lambda_j prod_{l > j} lambda_l |W_l|: Z_j
    meets the weights *after* layer j only. As sqrt(E |Z_j|^2) = c_j sqrt(d_j), Minkowski gives sqrt(E |h' -
    h|^2) <= g_m = sum_j T_j c_j sqrt(d_j) for party m, and with Jensen's inequality |F_c - F| <= L_loss
    sqrt(sum_m g_m^2).

    Args:
        parties: The layers of every party.
        loss_lipschitz: Lipschitz constant of the loss in all embeddings together (Euclidean norm of the
            joined vector). For a 1-Lipschitz loss of the *sum* of M embeddings it is sqrt(M).
    """
    total = 0.0
    for layers in parties:
        _check(layers, [0.0] * len(layers), loss_lipschitz=loss_lipschitz)
        moves = zip(_gains(layers), layers, strict=True)
        total += sum(gain * layer.level * math.sqrt(layer.width) for gain, layer in moves) ** 2
    return loss_lipschitz * math.sqrt(total)


def objective_gap_as_printed(parties: Sequence[Sequence[LayerBound]]) -> float:
    """The last line of appendix E.2 as printed, for the worst of the parties; not a valid bound.

    What is wrong: the loss's Lipschitz constant is lost on the way; E |Z_j|^2 is taken as c_j^2 although Z_j
    has d_j coordinates; the product for Z_j contains |W_j|, through which it never passes.
    """
    worst = 0.0
    for layers in parties:
        _check(layers, [0.0] * len(layers), loss_lipschitz=1.0)
        products, product = 0.0, 1.0
        for layer in reversed(layers):
            product *= (layer.lipschitz * layer.weight_norm) ** 2
            products += product
        worst = max(worst, math.sqrt(products * sum(layer.level**2 for layer in layers)))
    return len(parties) * worst


def _gains(layers: Sequence[LayerBound]) -> list[float]:
    """T_l: by how much layer l's pre-activation moves the embedding at most."""
    gains = [layers[-1].lipschitz]
    for layer, after in zip(reversed(layers[:-1]), reversed(layers[1:]), strict=True):
        gains.insert(0, gains[0] * after.weight_norm * layer.lipschitz)
    return gains


def _check(layers: Sequence[LayerBound], norms: Sequence[float], **constants: float) -> None:
    if not layers or len(norms) != len(layers):
        raise InputError(
            f"{len(norms)} input norms for {len(layers)} layers; one layer or more, one norm for each"
        )
    _check_norms(norms)
    for name, value in constants.items():
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{name} is {value}; expected a finite number of at least 0")


def _check_norms(norms: Sequence[float]) -> None:
    for norm in norms:
        if not (math.isfinite(norm) and norm >= 0):
            raise InputError(f"a norm is {norm}; expected a finite number of at least 0")
