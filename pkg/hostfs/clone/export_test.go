package clone

import (
	"context"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// TreeKnowing is Tree that remembers at most so many names.
func TreeKnowing(ctx context.Context, src, dst *dir.Dir, o Options, names int) (Result, error) {
	return tree(ctx, src, dst, o, names)
}
