"""Public descriptions of local sets: codes, bounds and column groups. No value is taken from rows."""

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

MFEAT_VIEWS: dict[str, int] = {"fac": 216, "fou": 76, "kar": 64, "mor": 6, "pix": 240, "zer": 47}


def parkinson_view(column: str) -> str:
    """The group of acoustic measurements that a column of the Parkinson speech set belongs to."""
    if column.startswith("tqwt_"):
        return "tqwt"
    if column.startswith(("Ea", "Ed", "det_", "app_")):
        return "wavelet"
    if "MFCC" in column or "delta" in column or column.endswith("Log_energy"):
        return "mfcc"
    return "baseline"
