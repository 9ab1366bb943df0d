"""Public descriptions of known sets: files, codes, bounds and column groups. No value is taken from rows."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Column -> possible values (text), or public bounds (numbers), in file order; from the set's adult.names.
# The bounds are round numbers that hold the survey's codes; larger values are clipped by public scaling.
ADULT: dict[str, tuple[str, ...] | tuple[float, float]] = {
    "age": (0.0, 100.0),
    "workclass": _words(
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked"
    ),
    "fnlwgt": (0.0, 1_500_000.0),
    "education": _words(
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters "
        "1st-4th 10th Doctorate 5th-6th Preschool"
    ),
    "education-num": (1.0, 16.0),
    "marital-status": _words(
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse"
    ),
    "occupation": _words(
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
        "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv "
        "Armed-Forces"
    ),
    "relationship": _words("Wife Own-child Husband Not-in-family Other-relative Unmarried"),
    "race": _words("White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
    "sex": ("Female", "Male"),
    "capital-gain": (0.0, 99_999.0),
    "capital-loss": (0.0, 5_000.0),
    "hours-per-week": (0.0, 100.0),
    "native-country": _words(
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India Japan "
        "Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal "
        "Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua "
        "Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands"
    ),
}

# Summary statistics (min, max) printed in scikit-learn's description of the set, rounded as printed there.
# A value just outside its rounded bound is clipped by public scaling.
BREAST_CANCER_BOUNDS: tuple[tuple[float, float], ...] = (
    (6.981, 28.11), (9.71, 39.28), (43.79, 188.5), (143.5, 2501.0), (0.053, 0.163),
    (0.019, 0.345), (0.0, 0.427), (0.0, 0.201), (0.106, 0.304), (0.05, 0.097),
    (0.112, 2.873), (0.36, 4.885), (0.757, 21.98), (6.802, 542.2), (0.002, 0.031),
    (0.002, 0.135), (0.0, 0.396), (0.0, 0.053), (0.008, 0.079), (0.001, 0.03),
    (7.93, 36.04), (12.02, 49.54), (50.41, 251.2), (185.2, 4254.0), (0.071, 0.223),
    (0.027, 1.058), (0.0, 1.252), (0.0, 0.291), (0.156, 0.664), (0.055, 0.208),
)  # fmt: skip
WINE_BOUNDS: tuple[tuple[float, float], ...] = (
    (11.0, 14.8), (0.74, 5.80), (1.36, 3.23), (10.6, 30.0), (70.0, 162.0), (0.98, 3.88), (0.34, 5.08),
    (0.13, 0.66), (0.41, 3.58), (1.3, 13.0), (0.48, 1.71), (1.27, 4.00), (278.0, 1680.0),
)  # fmt: skip
# The description says: centred, sum of squares 1 over 442 rows, so the deviation is 1/sqrt(442) = 0.048;
# 0.2 is a little over four deviations.
DIABETES_BOUNDS: tuple[float, float] = (-0.2, 0.2)
DIGITS_BOUNDS: tuple[float, float] = (0.0, 16.0)

# Codes of the credit card set; the repayment states run from -2 (no use) to 8 (months late).
UCI_CREDIT_CODES: dict[str, tuple[int, ...]] = {
    "SEX": (1, 2),
    "EDUCATION": tuple(range(7)),
    "MARRIAGE": tuple(range(4)),
    **{f"PAY_{month}": tuple(range(-2, 9)) for month in (0, 2, 3, 4, 5, 6)},
}

# Public bounds of its columns, none of them taken from rows: the codes of the set's description, ages of
# adults, and for amounts of money (New Taiwan dollars) round numbers that a bank would state in advance.
# Larger values are clipped by public scaling.
UCI_CREDIT_BOUNDS: dict[str, tuple[float, float]] = {
    "LIMIT_BAL": (0.0, 1_000_000.0),
    "SEX": (1.0, 2.0),
    "EDUCATION": (0.0, 6.0),
    "MARRIAGE": (0.0, 3.0),
    "AGE": (18.0, 100.0),
    **{f"PAY_{month}": (-2.0, 9.0) for month in (0, 2, 3, 4, 5, 6)},
    **{f"BILL_AMT{month}": (-100_000.0, 500_000.0) for month in range(1, 7)},
    **{f"PAY_AMT{month}": (0.0, 100_000.0) for month in range(1, 7)},
}

MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
MFEAT_VIEWS: dict[str, int] = {"fac": 216, "fou": 76, "kar": 64, "mor": 6, "pix": 240, "zer": 47}
MFEAT_FILES = tuple(f"mfeat-{view}.csv" for view in MFEAT_VIEWS)


def parkinson_view(column: str) -> str:
    """The group of acoustic measurements that a column of the Parkinson speech set belongs to."""
    if column.startswith("tqwt_"):
        return "tqwt"
    if column.startswith(("Ea", "Ed", "det_", "app_")):
        return "wavelet"
    if "MFCC" in column or "delta" in column or column.endswith("Log_energy"):
        return "mfcc"
    return "baseline"
