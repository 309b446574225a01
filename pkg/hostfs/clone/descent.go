package clone

import (
	"errors"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// maxOpen bounds the descriptors of a tower of directories.
const maxOpen = 64

// A descent is the path from the root of the copy to the directory that is filled. It
// keeps the last directories of it open, and finds those above again as parents: no other process
// moves anything in the copy.
type descent struct {
	root  level // not closed
	open  []level
	above []position // of those that are not open any more, from the root down
}

// A level is an open directory of the copy.
type level struct {
	*dir.Dir
	position
}

// A position is what a level is known by, and whether what it is a copy of has changed since it was made.
type position struct {
	id      dir.ID
	changed bool
}

func openLevel(d *dir.Dir, changed bool) (level, error) {
	id, err := d.ID()
	return level{d, position{id, changed}}, err
}

func (d *descent) current() level {
	if len(d.open) == 0 {
		return d.root
	}
	return d.open[len(d.open)-1]
}

// make makes a directory and goes into it.
func (d *descent) make(name string) error {
	sub, err := d.current().Make(name)
	return d.push(sub, false, err)
}

func (d *descent) enter(name string, changed bool) error {
	sub, err := d.current().Open(name)
	return d.push(sub, changed, err)
}

func (d *descent) push(sub *dir.Dir, changed bool, err error) error {
	if err != nil {
		return err
	}
	opened, err := openLevel(sub, changed)
	d.open = append(d.open, opened)
	if err != nil || len(d.open) <= maxOpen {
		return err
	}
	first := d.open[0]
	d.open = d.open[1:]
	d.above = append(d.above, first.position)
	return first.Close()
}

// leave goes up to the parent.
func (d *descent) leave() error {
	last := d.current()
	d.open = d.open[:len(d.open)-1]
	if len(d.open) > 0 || len(d.above) == 0 {
		return last.Close()
	}
	above := d.above[len(d.above)-1]
	d.above = d.above[:len(d.above)-1]
	parent, err := last.Parent(above.id)
	if err == nil {
		d.open = append(d.open, level{parent, above})
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
