package dir

import "errors"

// A Descent is the path from the root of a tree to the directory that is filled. It keeps the last directories of it open, and
// finds those above again as parents: no other process may move anything in the tree. Of each level it remembers a T.
type Descent[T any] struct {
	root  Level[T] // not closed
	open  []Level[T]
	above []levelAbove[T] // of those that are not open any more, from the root down
}

// A Level is an open directory of a [Descent].
type Level[T any] struct {
	*Dir
	Known ID
	Value T
}

type levelAbove[T any] struct {
	id    ID
	value T
}

// NewDescent begins at a root, which it does not close.
func NewDescent[T any](root *Dir, value T) (*Descent[T], error) {
	id, err := root.ID()
	return &Descent[T]{root: Level[T]{root, id, value}}, err
}

// Current is the directory that is filled. It is open until Leave.
func (d *Descent[T]) Current() Level[T] { return *d.current() }

func (d *Descent[T]) current() *Level[T] {
	if len(d.open) == 0 {
		return &d.root
	}
	return &d.open[len(d.open)-1]
}

// SetValue changes what is remembered of the current directory.
func (d *Descent[T]) SetValue(value T) { d.current().Value = value }

// Depth is how many directories lie between the root and the current one, and that itself.
func (d *Descent[T]) Depth() int { return len(d.above) + len(d.open) }

// Make makes a directory and goes into it.
func (d *Descent[T]) Make(name string, value T) error {
	sub, err := d.current().Make(name)
	return d.push(sub, value, err)
}

// Enter goes into a directory, unless it is a mount point.
func (d *Descent[T]) Enter(name string, value T) error {
	sub, err := d.current().OpenInside(name)
	return d.push(sub, value, err)
}

func (d *Descent[T]) push(sub *Dir, value T, err error) error {
	if err != nil {
		return err
	}
	id, err := sub.ID()
	d.open = append(d.open, Level[T]{sub, id, value})
	if err != nil || len(d.open) <= maxDepth {
		return err
	}
	first := d.open[0]
	d.open = d.open[1:]
	d.above = append(d.above, levelAbove[T]{first.Known, first.Value})
	return first.Close()
}

// Leave goes up to the parent.
func (d *Descent[T]) Leave() error {
	last := d.Current()
	d.open = d.open[:len(d.open)-1]
	if len(d.open) > 0 || len(d.above) == 0 {
		return last.Close()
	}
	above := d.above[len(d.above)-1]
	d.above = d.above[:len(d.above)-1]
	parent, err := Parent(last.Dir, above.id)
	if err == nil {
		d.open = append(d.open, Level[T]{parent, above.id, above.value})
	}
	return errors.Join(err, last.Close())
}

// Close ends the descent, wherever it is: it is at the root then.
func (d *Descent[T]) Close() error {
	var err error
	for _, open := range d.open {
		err = errors.Join(err, open.Close())
	}
	d.open, d.above = nil, nil
	return err
}
