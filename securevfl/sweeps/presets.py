"""Sweeps that answer the questions most users come with, ready to run.

`securevfl sweep --preset NAME --print` shows the file, to be changed at will.
"""

from __future__ import annotations

from securevfl.errors import InputError, nearest

QUICK = """\
# How much utility does each sound mode keep at epsilon 0.5 to 8, and what do published settings promise?
title = "Quick look: sound modes and published settings on embedded data"
parties = 3
batch = 64
epochs = 10
seeds = 3

[audit]
attacks = ["gradient-direction", "attribute-inference", "embedding-inversion"]
canaries = 1000

[[point]]
label = "label holder alone"
algorithm = "local"
optimiser = "exact"
grid = { data = ["synthetic:rows=3000,features=24,seed=0", "digits"] }

[[point]]
label = "all features in one place"
algorithm = "central"
optimiser = "exact"
grid = { data = ["synthetic:rows=3000,features=24,seed=0", "digits"] }

[[point]]
label = "sealed"
algorithm = "sealed"
batch = 2147483647
epochs = 80
grid = { data = ["synthetic:rows=3000,features=24,seed=0", "digits"], epsilon = [0.5, 1, 2, 4, 8] }

[[point]]
label = "frozen, released once"
algorithm = "vafl"
encoder_training = "none"
embedding = 4
grid = { data = ["synthetic:rows=3000,features=24,seed=0", "digits"], epsilon = [0.5, 1, 2, 4, 8] }

[[point]]
label = "dp-encoder"
data = "synthetic:rows=3000,features=24,seed=0"
algorithm = "vafl"
encoder_training = "dp"
epochs = 2
batch = 512
grid = { epsilon = [0.5, 1, 2, 4, 8] }

[[point]]
label = "strict"
algorithm = "vafl"
data = "synthetic:rows=3000,features=24,seed=0"
epochs = 2
grid = { epsilon = [0.5, 1, 2, 4, 8] }

[[point]]
label = "VAFL as published (noise 0.1)"
algorithm = "vafl"
sigma = 0.1
grid = { data = ["synthetic:rows=3000,features=24,seed=0", "digits"] }

[[point]]
label = "FDML as published (noise 3)"
data = "synthetic:rows=3000,features=24,seed=0"
algorithm = "fdml"
sigma = 3.0
clip = 5.0
"""

PAPERS = """\
# The papers' private settings, and the sound modes beside them. Give --data-folder with a9a/, parkinson/
# and mnist/.
title = "The papers' private settings beside sound modes"
seeds = 3

[audit]
attacks = ["gradient-direction", "attribute-inference"]
canaries = 2000

# FDML, Figure 4: noise on local predictions, logistic regression on a9a, 67 + 56 features. The paper states
# no clip; without one there is nothing to account for.
[[point]]
label = "FDML, Figure 4"
data = "a9a"
algorithm = "fdml"
clip = 5.0
staleness = 4
speeds = { p1 = 1.2 }
batch = 100
epochs = 4
learning_rate = 5.0
decay = "sqrt"
l2 = 1e-5
scaling = "none"
unprotected = true  # the first of them has no noise
grid = { sigma = [0.0, 0.5, 1.0, 2.0, 3.0, 5.0] }

[[point]]
label = "sealed, a9a"
data = "a9a"
algorithm = "sealed"
grid = { epsilon = [0.5, 1, 2, 4, 8] }

[[point]]
label = "frozen, released once, a9a"
data = "a9a"
algorithm = "vafl"
encoder_training = "none"
scaling = "none"
embedding = 4
batch = 100
epochs = 3
grid = { epsilon = [0.5, 1, 2, 4, 8] }

[[point]]
label = "dp-encoder, a9a"
data = "a9a"
algorithm = "vafl"
encoder_training = "dp"
scaling = "none"
batch = 1000
epochs = 2
grid = { epsilon = [0.5, 1, 2, 4, 8] }

[[point]]
label = "strict, a9a"
algorithm = "vafl"
data = "a9a"
scaling = "none"
batch = 1000
epochs = 1
grid = { epsilon = [0.5, 1, 2, 4, 8] }

[[point]]
data = "a9a"
batch = 100
epochs = 4
learning_rate = 5.0
decay = "sqrt"
l2 = 1e-5
scaling = "none"
fusion = "sum"
head = "sum"
embedding = 1
grid = { algorithm = ["local", "central"] }

# VAFL, section 5 and appendix G.2: noise of deviation 1 on Parkinson's disease, 0.1 on MNIST. Parkinson's
# columns have no public bounds, so sound modes have nothing to scale them by; they stand beside MNIST.
[[point]]
label = "VAFL, private, Parkinson"
data = "parkinson"
parties = 3
sigma = 1.0
clip = 10.0
l2 = 1e-3
learning_rate = 0.01
batch = 4
epochs = 12
delays = "poisson"
grid = { algorithm = ["vafl", "vafl-sync"] }

[[point]]
data = "parkinson"
parties = 3
batch = 16
epochs = 12
grid = { algorithm = ["local", "central"] }

[[point]]
label = "VAFL, private, MNIST"
algorithm = "vafl"
data = "mnist"
parties = 7
sigma = 0.1
clip = 10.0
l2 = 1e-3
learning_rate = 0.02
batch = 600
epochs = 3
seeds = 1
delays = "poisson"

[[point]]
label = "frozen, released once, MNIST"
data = "mnist"
parties = 7
algorithm = "vafl"
encoder_training = "none"
embedding = 8
batch = 600
epochs = 3
seeds = 1
grid = { epsilon = [0.5, 1, 2, 4, 8] }

# Ten residuals for each of 60,000 records and 42 pairs of parties in every iteration: views of that would
# fill a disk, so this point has none, and attacks do not apply.
[[point]]
label = "sealed, MNIST"
data = "mnist"
parties = 7
algorithm = "sealed"
epochs = 20
seeds = 1
record_views = false
grid = { epsilon = [0.5, 1, 2, 4, 8] }

[[point]]
data = "mnist"
parties = 7
batch = 600
epochs = 3
seeds = 1
grid = { algorithm = ["local", "central"] }
"""

PRESETS = {"quick": QUICK, "papers": PAPERS}


def preset(name: str) -> str:
    """The sweep file of that name.

    Raises:
        InputError: There is none; the nearest name is suggested.
    """
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]
