package render

import (
	"errors"
	"fmt"
	"slices"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
)

// A Spot is a pool on a node. What is for all nodes of a pool has no node.
type Spot struct{ Pool, Node string }

// A spot is a pool with a template on a node.
type spot struct {
	pool *hppv1.StoragePool
	node string
}

// names are those that the pool needs there, and what they are for.
func (s spot) names() map[string]Spot {
	names := map[string]Spot{MounterName(s.pool.Name, s.node): {s.pool.Name, s.node}}
	if s.pool.IsShared() {
		names[claimName(s.pool, s.node)] = Spot{Pool: s.pool.Name}
	}
	return names
}

// findSpots are the pools with a template on each node, without those whose names are of another one: pool a on node b-c and pool a-b on
// node c would have the same claim. Of several the one that is there keeps the name, or else the first has it. The error names the others.
func findSpots(facts *Facts, pools []hppv1.StoragePool) (found []spot, clashes error) {
	var all []spot
	owners := map[string]Spot{}
	for i := range pools {
		if pools[i].PVCTemplate == nil {
			continue
		}
		for _, node := range facts.Nodes {
			at := spot{&pools[i], node}
			all = append(all, at)
			for name, own := range at.names() {
				if _, taken := owners[name]; !taken || facts.Mounters[name] == own {
					owners[name] = own
				}
			}
		}
	}
	var problems []error
	found = slices.DeleteFunc(all, func(at spot) bool {
		clash := at.clash(facts, owners)
		problems = append(problems, clash)
		return clash != nil
	})
	return found, errors.Join(problems...)
}

// clash says which name that the pool needs there is that of another one, or that its claim is not as its template, which no mounter could
// mount; nil for none.
func (s spot) clash(facts *Facts, owners map[string]Spot) error {
	for name, own := range s.names() {
		of, has := facts.ClaimPools[name]
		if owners[name] == own && (!has || of == s.pool.Name) {
			continue
		}
		switch owner := owners[name]; {
		case owner.Node == "" && owner != own:
			of = owner.Pool
		case owner != own:
			of = owner.Pool + " on node " + owner.Node
		}
		return fmt.Errorf("pool %s on node %s: %s, the name of what it needs there, is that of pool %s: give the pool another name", s.pool.Name, s.node, name, of)
	}
	claim := claimName(s.pool, s.node)
	if _, made := facts.ClaimPools[claim]; made && facts.BlockClaims.Has(claim) != onDevice(s.pool) {
		return fmt.Errorf("pool %s on node %s: its claim %s has another volumeMode than the template: give the pool another name", s.pool.Name, s.node, claim)
	}
	return nil
}

// Clashes are pools on nodes that have nothing there, because its name is that of something else or its claim another one.
func (r *Renderer) Clashes() error { return r.clashes }
