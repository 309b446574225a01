package loop

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
)

// The kernel asks the file's filesystem for the numbers of the file (LOOP_GET_STATUS64 calls vfs_getattr), and reports nothing
// without them, not even the mark. That may be an NFS whose server is dead, below a device of another program, or what the user of
// a device has put below it. So a device is asked only if the kernel's name of its file, which needs no filesystem, may be that of
// a file that is looked for; none is waited for longer than a second; and none of which nothing is known hides another.

const (
	// patience is how long an inspection of a device may take. Most take microseconds.
	patience = time.Second
	// alone is how long a device is asked without another one beside it, or less if there are many.
	alone = 20 * time.Millisecond
)

// Attached are the attached devices on files that have one of these names, or had it when they were deleted, or all devices if no
// name is given: those of others included, in the order of their numbers. It opens each for an instant, and takes two seconds at
// most. Those whose filesystem cannot name the file any more, being gone, are left out.
func (k *Kernel) Attached(fileNames ...string) ([]Device, error) {
	devices, err := k.look(func(former string) bool {
		return len(fileNames) == 0 || former == "" || slices.Contains(fileNames, path.Base(strings.TrimSuffix(former, deleted)))
	})
	return slices.DeleteFunc(devices, func(d Device) bool { return d.Gone }), err
}

// All are the attached devices of the node: those of Attached, and those that it leaves out.
func (k *Kernel) All() ([]Device, error) { return k.look(func(string) bool { return true }) }

// look asks the devices whose file may be at a path that is looked for; empty for one that is not known. FormerPath is not set of
// those that answer.
func (k *Kernel) look(mayBe func(former string) bool) ([]Device, error) {
	names, err := candidates(mayBe)
	if err != nil {
		return nil, err
	}
	return askAll(names, k.Inspect)
}

// askAll asks devices, in their order and each alone, unless one takes long: then it is left to itself.
func askAll(names []string, inspect func(name string) (Device, error)) (devices []Device, err error) {
	found, problems := make([]Device, len(names)), make([]error, len(names))
	var asked sync.WaitGroup
	for i, name := range names {
		answered := make(chan struct{})
		asked.Go(func() {
			defer close(answered)
			found[i], problems[i] = inspect(name)
		})
		select {
		case <-answered:
		case <-time.After(min(alone, patience/time.Duration(len(names)))):
		}
	}
	asked.Wait()
	for i, err := range problems {
		switch {
		case errors.Is(err, ErrNotAttached):
		case err != nil:
			return nil, err
		default:
			devices = append(devices, found[i])
		}
	}
	return devices, nil
}

// candidates are the names of the devices whose file may be at a path that is looked for.
func candidates(mayBe func(former string) bool) (names []string, err error) {
	files, err := fileNames()
	if err != nil {
		return nil, err
	}
	for _, number := range slices.Sorted(maps.Keys(files)) {
		if mayBe(files[number]) {
			names = append(names, nodeName(number))
		}
	}
	return names, nil
}

// Inspect asks about one device by the name of its node, in microseconds. It returns ErrNotAttached. One whose filesystem cannot
// name the file any more is Gone. One whose filesystem refuses to, or does not within a second, is Silent; it is not asked again
// before it has answered.
func (k *Kernel) Inspect(name string) (Device, error) {
	d, err := ask(k, name, func() (Device, error) { return k.inspect(name) }, func(Device) {})
	if errors.Is(err, ErrSilent) {
		return inspectSilent(name)
	}
	return d, err
}

func (k *Kernel) inspect(name string) (Device, error) {
	node, d, err := k.holdNow(name)
	if err == nil {
		_ = node.close()
	}
	return d, err
}

// hold opens a device, which stays what it is from then on, and inspects it, within the limit of Inspect. Errors: ErrNotAttached,
// ErrSilent.
func (k *Kernel) hold(name string) (node, Device, error) {
	var d Device
	n, err := ask(k, name, func() (n node, err error) {
		n, d, err = k.holdNow(name)
		return n, err
	}, func(n node) { _ = n.close() })
	if err != nil {
		return node{}, Device{}, err
	}
	return n, d, nil
}

func (k *Kernel) holdNow(name string) (node, Device, error) {
	n, err := k.open(name, unix.O_RDONLY)
	if err != nil {
		return node{}, Device{}, err
	}
	d, err := n.inspect()
	if err != nil {
		return node{}, Device{}, errors.Join(err, n.close())
	}
	return n, d, nil
}

// ask does what asks the filesystem of a device. It returns ErrSilent if that takes longer than a second, and at once as long as
// an earlier one has not returned. Late gets what comes later.
func ask[T any](k *Kernel, name string, do func() (T, error), late func(T)) (T, error) {
	var none T
	k.mu.Lock()
	silent := k.silent[name] > 0
	k.mu.Unlock()
	if silent {
		return none, fmt.Errorf("%s: %w", name, ErrSilent)
	}
	answer, err := hang.Run(context.Background(), patience, do, func(answer T, err error) {
		if err == nil {
			late(answer)
		}
		k.count(name, -1)
	})
	if errors.Is(err, hang.ErrTimeout) {
		k.count(name, 1)
		return none, fmt.Errorf("%s: %w", name, ErrSilent)
	}
	return answer, err
}

// count adds to how many inspections of a device are abandoned. The last of them may return
// before its caller has counted it.
func (k *Kernel) count(name string, n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.silent[name] += n; k.silent[name] == 0 {
		delete(k.silent, name)
	}
}
