from .branches import Comparison as Comparison
from .branches import compare_branches as compare_branches
from .callbacks import Callback as Callback
from .callbacks import Stop as Stop
from .learning_rates import LearningRates as LearningRates
from .learning_rates import find_learning_rate as find_learning_rate
from .learning_rates import plot_learning_rates as plot_learning_rates
from .samples import write_samples as write_samples
