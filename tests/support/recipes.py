"""Recipes of configs/ whose own classes and functions tests call."""

from jaxscale.config.config_file import load_file
from support.paths import ROOT

alexnet_bn_32k = load_file(ROOT / "configs" / "alexnet_bn_32k.py")
exchange_power_sgd = load_file(ROOT / "configs" / "exchange_power_sgd.py")
exchange_top_k = load_file(ROOT / "configs" / "exchange_top_k.py")
power_sgd, PowerSGD = exchange_power_sgd.power_sgd, exchange_power_sgd.PowerSGD
AlexNetModule = alexnet_bn_32k.AlexNetModule
top_k, TopK = exchange_top_k.top_k, exchange_top_k.TopK
