"""From safetensors to one rank's weights: manifest, index, reader."""
