"""The private interfaces of torch and CPython in use, each feature-detected, with a public fallback.

Only `_version`, `_base` and the registries of modules, which all versions have, are read elsewhere as well.
"""

from .autograd import *
from .compiler_budget import *
from .compilers import *
from .dict_contents import *
from .dynamo import *
from .fake_tensors import *
from .graph_compilers import *
from .graph_positions import *
from .inductor_code import *
from .joint_graphs import *
from .kernel_switches import *
from .modes import *
from .module_functions import *
from .profiler_events import *
from .storages import *
from .tensor_guards import *
