"""Generated from proto/lastwords.proto by tools/generate_proto.py; do not edit."""
