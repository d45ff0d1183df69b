"""The policies and models that the FL-R²SP experiments compare, under the paper's names."""

from __future__ import annotations

BSP, BSP_FILTERED = "bsp:fraction=0.75,weights=mean", "filtered:policy=(bsp:fraction=0.75,weights=mean)"
FL, FL_PLAIN, PRINTED = "fl-r2sp", "fl-r2sp:filter=false", "fl-r2sp:as_printed=true"

#: Everything that is trained.
SCHEMES = {
    "BSP": BSP,
    "BSP, filtered": BSP_FILTERED,
    "FL-R²SP, not filtered": FL_PLAIN,
    "FL-R²SP": FL,
    "FL-R²SP, as printed": PRINTED,
    "ASP": "asp:weights=mean",
    "SAFA": "safa:fraction=0.75",
    "FedBuff": "fedbuff:k=12,rate=0.25",
}
#: The schemes of the paper, with and without its filter for outliers.
CORE = (BSP, BSP_FILTERED, FL_PLAIN, FL)

#: The models, and how the names of their clusters spell them.
MODELS = {"CNN": "cnn", "LSTM": "lstm", "ResNet20": "resnet20"}
CLIENTS = 128


def rounds(quick: bool) -> int:
    """Return the number of rounds that a timing simulation takes."""
    return 24 if quick else 60
