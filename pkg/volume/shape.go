package volume

// A Shape is what a copy of a volume on another node has to have like the volume.
type Shape struct {
	Mode Mode
	// Bytes is the size promised.
	Bytes int64
	// BlockBytes is the logical block of a block volume's devices; 0 for a directory.
	BlockBytes int64
	// BytesPerInode is the size for which the volume has one inode, in bytes; 0 for no limit.
	BytesPerInode int64
}
