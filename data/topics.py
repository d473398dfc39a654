"""Topics and templates of the built-in everyday chat prompts.

Each kind of request has its own templates (separate for training and evaluation) and a pool of topics, of which every
sixth is held out for evaluation. Many topics on purpose: a target that gives the same answer again and again makes a
drafter look better than it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from data.templates import _lines


@dataclass(frozen=True)
class Kind:
    """One kind of request: templates with the blank `{topic}`, and what can fill it."""

    train: tuple[str, ...]
    eval: tuple[str, ...]
    topics: tuple[str, ...]


def _topics(text: str) -> tuple[str, ...]:
    return tuple(topic.strip() for topic in text.replace("\n", " ").split(";"))


HABITS = Kind(
    _lines(
        """
        Give me some tips for {topic}.
        I would like to get better at {topic}. What should I do first?
        What are common mistakes when {topic}?
        How can I make {topic} part of my daily routine?
        My friend has trouble with {topic}. What advice could I give?
        Write a short motivational message for someone who is {topic}.
        What do I need to know before {topic} for the first time?
        """
    ),
    _lines(
        """
        Could you share a few ideas that make {topic} easier?
        What helped other people with {topic}?
        """
    ),
    _topics(
        """learning to play the guitar; growing tomatoes on a balcony; waking up early; studying for exams;
        saving money; running a first marathon; learning Spanish; cooking for one person; giving a speech;
        moving to a new city; training a puppy; writing a diary; meditating; packing for a trip; looking for a job;
        organizing a small kitchen; painting with watercolors; taking photos at night; baking bread;
        hosting a dinner party; reading more books; drinking enough water; working from home; making new friends;
        riding a bicycle to work; planning a wedding; keeping houseplants alive; learning chess; swimming in the sea;
        camping in the rain; raising chickens; writing a resume; preparing for an interview;
        teaching children to read; cleaning the garage; sewing a dress; knitting a scarf; fixing a flat tire;
        hiking in the mountains; sleeping better; using less plastic; driving in snow; buying a used car;
        choosing a laptop; starting a blog; running a book club; singing in a choir; learning to draw faces;
        keeping a budget; growing herbs indoors; adopting a cat; learning to dance; volunteering at a shelter;
        repairing old furniture; making homemade soap; visiting a museum with children; managing stress at work;
        speaking in meetings; remembering names; playing the piano; brewing coffee; setting up an aquarium;
        building a birdhouse; starting a vegetable garden; walking ten thousand steps a day"""
    ),
)

EXPLAIN = Kind(
    _lines(
        """
        Explain {topic} to a ten-year-old.
        In simple words, what is the idea behind {topic}?
        Write a short paragraph about {topic}.
        I have to give a talk about {topic}. What are the main points?
        Why should people care about {topic}?
        Describe {topic} with an everyday example.
        What is something surprising about {topic}?
        """
    ),
    _lines(
        """
        How would a good teacher introduce {topic}?
        Tell me about {topic} in a few sentences.
        """
    ),
    _topics(
        """rainbows; photosynthesis; the water cycle; gravity; volcanoes; earthquakes; the phases of the moon; vaccines;
        recycling; the internet; electric cars; solar panels; black holes; dinosaurs; the Roman Empire; the Silk Road;
        the invention of the printing press; the first moon landing; democracy; inflation; supply and demand; taxes;
        bees and pollination; coral reefs; the rainforest; migration of birds; hibernation; the human heart; the brain;
        digestion; sleep and dreams; the immune system; bacteria; DNA; evolution; glaciers; tides; hurricanes;
        lightning; magnets; sound waves; the speed of light; batteries; bridges; airplanes; submarines; the compass;
        the calendar; fractions; probability; prime numbers; the Pythagorean theorem; computer programs;
        search engines; passwords; artificial intelligence; robots; the stock market; insurance;
        the Great Wall of China; the pyramids of Egypt; the Olympic Games; jazz music; the theater; chocolate; coffee;
        bread; the history of tea; whales; spiders; elephants; octopuses; deserts; the deep sea; rivers; fossils;
        recycling paper; wind power; clouds; seasons"""
    ),
)

STORY = Kind(
    _lines(
        """
        Write a short story about {topic}.
        Write the opening of a children's book about {topic}.
        Invent a funny scene about {topic}.
        Write a poem about {topic}.
        Tell a bedtime story about {topic} with a happy ending.
        """
    ),
    _lines(
        """
        Imagine a tale about {topic} and tell me how it begins.
        Can you make up a little adventure about {topic}?
        """
    ),
    _topics(
        """a dragon who is afraid of fire; a lighthouse keeper and a lost whale; a robot who wants to be a gardener;
        two sisters who find an old map; a cat who rides the subway; a baker whose bread makes people laugh;
        a shy ghost; a boy who can talk to trees; a violin that plays by itself; a snail who wins a race;
        an astronaut on a tiny planet; a librarian with a secret door; a storm that would not end;
        a fox and a clever crow; a clock that runs backwards; a girl who collects clouds; a pirate who gets seasick;
        a village without shadows; a penguin in the desert; a detective and a missing cake;
        a wizard who forgot the magic words; a mouse who lives in a piano; a bridge that leads to yesterday;
        a sleepy bear in a big city; a letter that arrives a hundred years late; a farmer who grows stars;
        a painter who paints the future; a little boat on a huge river; an umbrella with wings;
        a giant who is too small; a teacher on the moon; a dog who becomes mayor; a king who wants to cook;
        a snowman in summer; a mirror that tells jokes; a train to the end of the world; a turtle who paints"""
    ),
)

LETTER = Kind(
    _lines(
        """
        Write a polite email to {topic}.
        Help me write a short letter to {topic}.
        Draft a friendly message to {topic}.
        What should I write in a note to {topic}?
        """
    ),
    _lines(
        """
        I do not know how to begin a message to {topic}. Can you write one?
        Compose a brief and warm text to {topic}.
        """
    ),
    _topics(
        """my teacher, asking for more time for a project; my boss, asking for a day off; a neighbor about loud music;
        a friend who moved away; my grandmother, thanking her for a gift; a hotel, asking about a late arrival;
        a landlord about a broken heater; a customer whose order is late; a colleague who got promoted; a job applicant;
        the city council about a dangerous crossing; a club, asking how to join; a company, complaining about a toaster;
        my team about a change of schedule; a professor, asking for feedback; a friend who is ill; a new coworker;
        my cousin, inviting her to a birthday party; a charity, offering to help; a shop, asking for a refund;
        an author whose book I loved; my doctor, moving an appointment; a museum, asking about a guided tour;
        parents about a school trip; a photographer, asking about prices; a restaurant, booking a table for twelve"""
    ),
)

COMPARE = Kind(
    _lines(
        """
        What are the differences between {topic}?
        Compare {topic}. Which one would you recommend to a beginner?
        List the advantages and disadvantages of {topic}.
        I cannot choose between {topic}. What should I think about?
        """
    ),
    _lines(
        """
        Help me decide between {topic}.
        How do {topic} differ in practice?
        """
    ),
    _topics(
        """cats and dogs; tea and coffee; trains and planes; books and movies; city life and country life;
        renting and buying a home; a laptop and a tablet; summer and winter holidays; running and cycling;
        online and classroom courses; gas stoves and electric stoves; paper books and e-books; yoga and weight training;
        oil paint and watercolors; cooking at home and eating out; working alone and working in a team; jazz and rock;
        a hotel and a tent; a credit card and cash; public schools and private schools; butter and olive oil;
        a small company and a large company; pencils and pens; bicycles and scooters; fresh and frozen vegetables;
        Python and JavaScript; the sea and the mountains; board games and video games; radio and podcasts"""
    ),
)

PLAN = Kind(
    _lines(
        """
        Make a plan for {topic}.
        Suggest a checklist for {topic}.
        What do I need for {topic}, and in which order should I do things?
        Describe a good schedule for {topic}.
        Write step-by-step instructions for {topic}.
        """
    ),
    _lines(
        """
        How should I prepare for {topic}?
        Walk me through {topic} from start to finish.
        """
    ),
    _topics(
        """a weekend in Lisbon; a birthday party for six-year-olds; a week of vegetarian dinners; a school science fair;
        a three-day hiking trip; a spring cleaning day; a family reunion; a picnic in the park; a day in Rome;
        a small charity concert; a vegetable soup; a chocolate cake; pancakes for breakfast; a homemade pizza;
        an apple pie; a fruit salad; a lesson about the planets; a movie night at home; a road trip with a baby;
        a garage sale; a garden party; a first day at a new school; a visit to Kyoto; a rainy Sunday with children;
        a month without sugar; a beginner's workout; a potato salad; a neighborhood clean-up; a surprise party;
        painting a bedroom; assembling a bookshelf; planting a tree; washing a wool sweater; changing a light bulb;
        making lemonade; making tomato sauce; cleaning a bicycle; wrapping a present; folding a paper airplane"""
    ),
)

ENDINGS = {
    "train": _lines(
        """
        Keep it friendly.
        Answer in one paragraph.
        Please be specific.
        Use simple language.
        Keep the answer short.
        Add one example from real life.
        """
    ),
    "eval": _lines(
        """
        A few sentences are enough.
        Make it easy to follow.
        """
    ),
}

CHAT = (HABITS, EXPLAIN, STORY, LETTER, COMPARE, PLAN)
