package clone

import (
	"context"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// TreeWithin is Tree that remembers at most so many names, and so many bytes of what it captures.
func TreeWithin(ctx context.Context, src, dst *dir.Dir, o Options, names, bytes int) (Result, error) {
	return tree(ctx, src, dst, o, memory{names, bytes})
}
