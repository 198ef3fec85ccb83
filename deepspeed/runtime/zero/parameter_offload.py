class DeepSpeedZeRoOffload:
    def __init__(self, module, hooks, coordinator):
        self.module = module
