from fastamp.cpu.amp import autocast as autocast
