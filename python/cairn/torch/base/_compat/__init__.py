"""All private interfaces of torch and CPython that cairn.torch uses; `tools/check_layers` refuses them elsewhere.

Uses detect whether an interface is there. docs/explanation/private-interfaces.md says what happens without each. Only
`_version`, `_base` and the registries of modules, which all versions have, are read elsewhere as well.
"""

from .autograd import *
from .compiler_budget import *
from .compilers import *
from .dict_contents import *
from .dict_versions import *
from .dynamo import *
from .fake_tensors import *
from .graph_compilers import *
from .graph_positions import *
from .host_memory_access import *
from .inductor_code import *
from .joint_graphs import *
from .kernel_flags import *
from .modes import *
from .module_functions import *
from .operator_schemas import *
from .profiler_events import *
from .pytrees import *
from .storages import *
from .tensor_guards import *
