"""What the pages of docs/ show is true."""
