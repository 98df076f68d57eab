"""The live service: `app` has the ports, `driver` feeds the controller and does what it says, `legs` and `relay` carry
requests to engines and answers to clients, `membership` knows the workers."""
