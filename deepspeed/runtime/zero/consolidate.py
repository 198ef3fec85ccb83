def consolidated_state_dict(module, exclude_frozen=False):
    raise NotImplementedError


def iter_full_parameters(module):
    raise NotImplementedError
