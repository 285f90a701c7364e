"""Python imports this module at start, from whatever folder of PYTHONPATH has it first."""
import cpu_fixups

cpu_fixups.install()
