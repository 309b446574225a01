package clone

import (
	"errors"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// maxOpen bounds the descriptors of a tower of directories.
const maxOpen = 64

// A descent is the path from the root of the copy to the directory that is filled. It
// keeps the last directories of it open, and finds those above again as parents: no other process
// else moves anything in the copy.
type descent struct {
	root  *dir.Dir // not closed
	open  []*dir.Dir
	above []dir.ID // of those that are not open any more, from the root down
}

func (d *descent) current() *dir.Dir {
	if len(d.open) == 0 {
		return d.root
	}
	return d.open[len(d.open)-1]
}

// make makes a directory and goes into it.
func (d *descent) make(name string) error {
	sub, err := d.current().Make(name)
	return d.push(sub, err)
}

func (d *descent) enter(name string) error {
	sub, err := d.current().Open(name)
	return d.push(sub, err)
}

func (d *descent) push(sub *dir.Dir, err error) error {
	if err != nil {
		return err
	}
	d.open = append(d.open, sub)
	if len(d.open) <= maxOpen {
		return nil
	}
	first := d.open[0]
	d.open = d.open[1:]
	id, err := first.ID()
	d.above = append(d.above, id)
	return errors.Join(err, first.Close())
}

// leave goes up to the parent.
func (d *descent) leave() error {
	last := d.current()
	d.open = d.open[:len(d.open)-1]
	if len(d.open) > 0 || len(d.above) == 0 {
		return last.Close()
	}
	parent, err := last.Parent(d.above[len(d.above)-1])
	d.above = d.above[:len(d.above)-1]
	if err == nil {
		d.open = append(d.open, parent)
	}
	return errors.Join(err, last.Close())
}

// close ends the descent, wherever it is.
func (d *descent) close() error {
	var err error
	for _, open := range d.open {
		err = errors.Join(err, open.Close())
	}
	d.open, d.above = nil, nil
	return err
}
